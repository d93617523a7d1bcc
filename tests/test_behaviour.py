"""The page of the contract is what the test modules say, and these name tests that are there."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import behaviour


def test_the_page_is_what_the_tests_say():
    assert behaviour.PAGE.read_text(encoding="utf-8") == behaviour.page(), "run python tools/behaviour.py"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("no table", "opens with no table"),
        ("| kind | outcome | test |\n| --- | --- | --- |\n| a | b | test_missing |", "names test_missing for 'a'"),
        ("| kind | outcome | test |\n| --- | --- | --- |\n| a | b | test_one[other] |", r"names test_one\[other\]"),
    ],
)
def test_a_table_that_names_no_test_is_refused(tmp_path, monkeypatch, table, said):
    monkeypatch.setattr(behaviour, "ROOT", tmp_path)
    module = tmp_path / "test_it.py"
    module.write_text(f'''"""Title.\n\n{table}\n"""\n\nCASES = ["this"]\n\ndef test_one(): ...\n''')
    with pytest.raises(ValueError, match=said):
        behaviour.rows_of(module)
