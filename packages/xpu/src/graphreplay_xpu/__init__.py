"""The XPU backend of graphreplay: once installed, ``graphreplay.get_graphed_forward_cls("xpu")`` finds it."""

from importlib.metadata import version

from graphreplay_xpu.forward import XPUGraphedForward

__version__ = version("graphreplay-xpu")

__all__ = ["XPUGraphedForward", "__version__"]
