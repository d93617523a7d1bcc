"""The workspace agrees with itself: versions, changelogs, ranges, pins and documented commands."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [*sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")), ROOT / "harness"]
PROJECTS = {folder: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS}
VERSIONS = {project["name"]: project["version"] for project in PROJECTS.values()}
PINS = [
    line
    for line in (ROOT / "requirements-dev.txt").read_text().splitlines()
    if line and not line.startswith(("#", "-e "))
]

each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def requirements(folder: Path) -> list[Requirement]:
    project = PROJECTS[folder]
    extras = project.get("optional-dependencies", {}).values()
    return [Requirement(text) for texts in [project["dependencies"], *extras] for text in texts]


@each_folder
def test_version_is_the_newest_in_the_changelog(folder):
    newest = re.search(r"^## (\S+)", (folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == PROJECTS[folder]["version"]


@each_folder
def test_ranges_admit_the_siblings_of_this_tree(folder):
    for requirement in requirements(folder):
        if requirement.name in VERSIONS:
            assert requirement.specifier.contains(VERSIONS[requirement.name]), requirement


@each_folder
def test_package_ships_licence_readme_and_types(folder):
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (folder / "README.md").is_file()
    assert list(folder.glob("src/*/py.typed"))


@each_folder
def test_package_is_installed_by_the_development_pins(folder):
    text = (ROOT / "requirements-dev.txt").read_text()
    assert re.search(rf"^-e {re.escape(str(folder.relative_to(ROOT)))}(\[|$)", text, re.MULTILINE)


@each_folder
def test_no_dependency_on_torch_testing_utils(folder):
    names = {requirement.name for requirement in requirements(folder)} | {pin.split("==")[0] for pin in PINS}
    assert "torch-testing-utils" not in names


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documented_make_targets_exist(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # Only commands count: in code spans, or at the start of a line of a code block.
    named = set(re.findall(r"(?:`|^[ \t]*\$? ?)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
    assert named
    assert named <= targets


def test_every_development_requirement_is_pinned():
    assert [pin for pin in PINS if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", pin)] == []
