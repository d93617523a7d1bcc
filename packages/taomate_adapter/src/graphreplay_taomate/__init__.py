"""graphreplay behind TaoMate's call sites: the names that it uses, with its AdaLN memo kept out of captures.

graphed = graphreplay_taomate.GraphedForward(dit, device="cuda", max_entries=16, name="teacher")
y = graphed(variant=("teacher", "lora_off"), pin=True, x=x)
"""

from importlib.metadata import version

from graphreplay import clone_static, copy_into, kwargs_signature
from graphreplay_taomate.adaln import capture_context
from graphreplay_taomate.forward import GraphedForward, get_graphed_forward_cls
from graphreplay_taomate.substitution import install, uninstall

__version__ = version("graphreplay-taomate")

__all__ = [
    "GraphedForward",
    "__version__",
    "capture_context",
    "clone_static",
    "copy_into",
    "get_graphed_forward_cls",
    "install",
    "kwargs_signature",
    "uninstall",
]
