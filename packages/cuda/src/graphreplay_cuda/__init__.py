"""The CUDA backend of graphreplay: once installed, ``graphreplay.get_graphed_forward_cls("cuda")`` finds it."""

from importlib.metadata import version

from graphreplay_cuda.forward import CUDAGraphedForward

__version__ = version("graphreplay-cuda")

__all__ = ["CUDAGraphedForward", "__version__"]
