"""The code in this package's README runs, and prints what it says."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_example(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (promised,) = re.findall(r"print\(.*\)  # (.+)", code)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == f"{promised}\n"
