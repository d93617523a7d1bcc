"""Check the built wheels the way a user meets them: installed one by one into a fresh environment.

Run as `python tools/check_wheels.py dist`.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CORE_IMPORTS = "import graphreplay"

CUDA_IS_ABSENT = """
import importlib.util
assert importlib.util.find_spec("graphreplay_cuda") is None
"""

CUDA_NAMES_ITS_PACKAGE = """
import graphreplay
try:
    graphreplay.get_graphed_forward_cls("cuda")
except graphreplay.BackendNotInstalledError as error:
    assert "needs graphreplay-cuda" in str(error), str(error)
else:
    raise AssertionError("no BackendNotInstalledError")
"""

CPU_IS_REFERENCE = """
import graphreplay
assert graphreplay.get_graphed_forward_cls("cpu") is graphreplay.ReferenceGraphedForward
"""

NO_TEST_TOOLS = """
from importlib.metadata import distributions
installed = {distribution.name.lower() for distribution in distributions()}
assert not installed & {"hypothesis", "pytest"}, sorted(installed)
"""

TAOMATE_NAMES_THE_MISSING_PACKAGE = """
import graphreplay_taomate
cls = graphreplay_taomate.get_graphed_forward_cls()
graphed = cls(print, device="cuda")
assert not graphed.enabled
assert "needs graphreplay-cuda" in graphed.disabled_reason, graphed.disabled_reason
assert cls(print, device="cpu", reference=True).enabled
"""

CUDA_IMPORTS = "import graphreplay_cuda"

CUDA_IS_COMPILED = """
from graphreplay_cuda import native
assert native.missing is None, native.missing
"""

XPU_NAMES_ITS_PACKAGE = """
import graphreplay, importlib.util
assert importlib.util.find_spec("graphreplay_xpu") is None
try:
    graphreplay.get_graphed_forward_cls("xpu")
except graphreplay.BackendNotInstalledError as error:
    assert "needs graphreplay-xpu" in str(error), str(error)
else:
    raise AssertionError("no BackendNotInstalledError")
"""

XPU_NEEDS_A_DEVICE = """
import graphreplay, graphreplay_xpu, torch
try:
    cls = graphreplay.get_graphed_forward_cls("xpu")
except graphreplay.BackendUnavailableError as error:
    assert not torch.xpu.is_available()
    assert "xpu is not here: " in str(error), str(error)
else:
    assert torch.xpu.is_available(), "no BackendUnavailableError"
    assert cls is graphreplay_xpu.XPUGraphedForward
"""

CUDA_NEEDS_A_GPU = """
import graphreplay, torch, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a CUDA build of PyTorch warns where there is no driver
    available = torch.cuda.is_available()
try:
    graphreplay.get_graphed_forward_cls("cuda")
except graphreplay.BackendUnavailableError:
    assert not available
else:
    assert available, "no BackendUnavailableError"
"""


class CheckFailed(Exception):
    pass


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise CheckFailed(done.stdout.strip())


def has_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        raise CheckFailed("\n".join(names))


def wheel_of(dist: Path, project: str) -> Path:
    found = list(dist.glob(f"{project}-*.whl"))
    if len(found) != 1:
        raise CheckFailed(f"expected one wheel of {project} in {dist}, found {len(found)}")
    return found[0]


def torch_pin() -> str:
    pin = re.search(r"^torch==\S+$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    if pin is None:
        raise CheckFailed("requirements-dev.txt does not pin torch")
    return pin.group()


def check(name: str, action: Callable[[], None]) -> None:
    start = time.monotonic()
    try:
        action()
    except CheckFailed as error:
        print(f"FAILED {time.monotonic() - start:6.1f} s  {name}\n{error}", flush=True)
        raise
    print(f"ok     {time.monotonic() - start:6.1f} s  {name}", flush=True)


def check_all(dist: Path, temporary: Path) -> None:
    python = temporary / "venv" / "bin" / "python"

    def install(*requirements: str | Path) -> None:
        run(python, "-m", "pip", "install", "--quiet", "--find-links", dist, *requirements, cwd=temporary)

    def uninstall(project: str) -> None:
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", project, cwd=temporary)

    def check_code(name: str, code: str) -> None:
        # -I: imports come from the environment alone, not from PYTHONPATH or the current folder
        check(name, lambda: run(python, "-I", "-c", code, cwd=temporary))

    core = wheel_of(dist, "graphreplay_core")
    cuda = wheel_of(dist, "graphreplay_cuda")
    xpu = wheel_of(dist, "graphreplay_xpu")
    taomate = wheel_of(dist, "graphreplay_taomate")
    for wheel in sorted(dist.glob("*.whl")):
        check(f"{wheel.name} contains its licence", partial(has_licence, wheel))

    check("a fresh environment", lambda: venv.create(temporary / "venv", with_pip=True))
    check("the core installs alone", lambda: install(torch_pin(), core))
    check_code("graphreplay imports", CORE_IMPORTS)
    check_code("graphreplay_cuda is not there", CUDA_IS_ABSENT)
    check_code('"cuda" names the package to install', CUDA_NAMES_ITS_PACKAGE)
    check_code('"xpu" names the package to install', XPU_NAMES_ITS_PACKAGE)
    check_code('"cpu" is the reference', CPU_IS_REFERENCE)
    check_code("no test tools came along", NO_TEST_TOOLS)

    check("the XPU backend installs beside it", lambda: install(xpu))
    check_code('"xpu" asks for a device', XPU_NEEDS_A_DEVICE)
    check_code("graphreplay_cuda is still not there", CUDA_IS_ABSENT)
    check("the XPU backend goes", lambda: uninstall("graphreplay-xpu"))

    check("the TaoMate adapter installs beside the core, without a backend", lambda: install(taomate))
    check_code("graphreplay_taomate names the missing backend", TAOMATE_NAMES_THE_MISSING_PACKAGE)
    check("the TaoMate adapter goes", lambda: uninstall("graphreplay-taomate"))

    check("the CUDA backend installs beside it", lambda: install(cuda))
    check_code("graphreplay_cuda imports", CUDA_IMPORTS)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        print("skipped          its compiled part is there: not for free-threaded Pythons", flush=True)
    elif shutil.which("cc"):
        check_code("its compiled part is there", CUDA_IS_COMPILED)
    else:
        print("skipped          its compiled part is there: this machine has no C compiler", flush=True)
    check_code('"cuda" asks for a GPU', CUDA_NEEDS_A_GPU)


def main() -> int:
    dist = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="graphreplay-wheels-") as temporary:
        try:
            check_all(dist, Path(temporary))
        except CheckFailed:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
