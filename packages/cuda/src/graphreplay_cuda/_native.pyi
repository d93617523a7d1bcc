from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

INTERFACE: int

def bind(functions: tuple[int, ...], tensor_offset: int, keys_offset: int, tensor_base: type, /) -> None: ...
def read_versions(offset: int, /) -> None: ...
def watch(add_watcher: int, watch: int, unwatch: int, /) -> None: ...
def address(tensor: Tensor, /) -> int: ...

class Looks:
    def __init__(
        self, tensors: tuple[Tensor, ...], firsts: tuple[int, ...], check: Callable[..., bool] | None, /
    ) -> None: ...
    def alike(self, *tensors: Any) -> bool: ...

class Loader:
    def __init__(
        self,
        table: object,
        sizes: int,
        sources: int,
        targets: int,
        inputs: int,
        outputs: int,
        set_params: int,
        executable: int,
        node: int,
        params: int,
        /,
    ) -> None: ...
    def load(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], /) -> int: ...

class Sight:
    def __init__(
        self,
        look_alike: Callable[..., bool],
        tensors: tuple[Tensor, ...],
        dicts: tuple[dict[Any, Any], ...],
        objects: tuple[Any, ...],
        /,
    ) -> None: ...
    def lasts(self) -> bool: ...
