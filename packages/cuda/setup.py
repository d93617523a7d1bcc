"""The compiled part; all else about this package is in pyproject.toml."""

import sysconfig
import tempfile

from setuptools import Extension, setup

# One build for all Pythons from 3.11 on, but for those without the interpreter's lock, which have no such interface.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

NATIVE = Extension(
    "graphreplay_cuda._native",
    sources=[f"native/{name}.c" for name in ("module", "loader", "looks", "sight", "watched")],
    depends=["native/native.h"],
    extra_compile_args=["-O2", "-Wall", "-fvisibility=hidden"],
    py_limited_api=True,
    optional=True,  # where no compiler is, the package does without
)

# Not beside the sources, where what an earlier build left would get into the next wheel.
with tempfile.TemporaryDirectory(prefix="graphreplay-cuda-") as build:
    setup(
        ext_modules=[] if FREE_THREADED else [NATIVE],
        options={"build": {"build_base": build}, "bdist_wheel": {} if FREE_THREADED else {"py_limited_api": "cp311"}},
    )
