"""Check every text file git knows or would add: whitespace, size, merge markers, syntax of data files."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 500_000
MERGE_MARKERS = ("<<<<<<< ", "||||||| ", ">>>>>>> ")
PARSERS = {".json": json.loads, ".toml": tomllib.loads}


def problems(path: Path) -> Iterator[str]:
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        yield f"{path}: {len(data)} bytes, more than {MAX_BYTES}"
    if not data or b"\0" in data:
        return
    text = data.decode()
    if not text.endswith("\n") or text.endswith("\n\n"):
        yield f"{path}: must end with exactly one newline"
    for number, line in enumerate(text.split("\n"), start=1):
        if line != line.rstrip():
            yield f"{path}:{number}: trailing whitespace"
        if line.startswith(MERGE_MARKERS):
            yield f"{path}:{number}: merge marker"
        if "\t" in line and path.suffix in {".py", ".yaml", ".yml"}:
            yield f"{path}:{number}: tab"
    if parse := PARSERS.get(path.suffix):
        try:
            parse(text)
        except ValueError as error:
            yield f"{path}: {error}"


def main() -> int:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, check=True, capture_output=True)
    # A path in a merge conflict is listed once per side; a file deleted but not staged, too.
    paths = {Path(name) for name in listing.stdout.decode().split("\0") if name}
    found = [problem for path in sorted(paths) if path.is_file() for problem in problems(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
