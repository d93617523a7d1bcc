"""Whether tensors look like others, asked in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def looks_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check, in one call, whether as many tensors look like these: their classes, dtypes, devices, layouts, shapes,
    strides, ``requires_grad``, lazy bits, whether they were made under inference mode, and that no two are one object.
    It also says no where the calling thread's state (autocast, inference mode) is another than now.

    That is the check of guards in torch.compile, which is exact about what a kernel can see.
    """
    # Not a public name, but one of long standing; a test tries each of the properties above on the torch at hand.
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = guards.check
    return check
