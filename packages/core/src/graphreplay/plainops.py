"""Operators of which an observer needs to see the tensors that they are given and return, and nothing else."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from graphreplay.generators import may_draw, takes_generators
from graphreplay.hostsync import may_sync
from graphreplay.opmode import is_composite, may_write, namespace_of, per_op

_KNOWN_PARTS = frozenset(
    {
        "aten::linear",
        "aten::matmul",
        "aten::reshape",
        "aten::flatten.using_ints",
        "aten::unflatten.int",
        "aten::chunk",
        "aten::contiguous",
        "aten::to.dtype",
        "aten::layer_norm",
        "aten::rms_norm",
        "aten::group_norm",
        "aten::conv1d",
        "aten::conv2d",
    }
)
"""Composite operators whose parts are known: they compute, and write, draw and wait for nothing. So they can run whole,
as they do without a mode, in a fraction of the time that their parts take one by one. Those of networks by number."""


@per_op
def is_plain(op: Any) -> bool:
    """Whether an operator, whatever it is given, at most reads the tensors among its positional arguments: it writes
    none, draws no random numbers and does not make the host wait, unless for tensors of several devices."""
    if not isinstance(op, OpOverload) or namespace_of(op) != "aten":
        return False
    if may_write(op) or may_sync(op) or may_draw(op, ()) or takes_generators(op):
        return False
    if is_composite(op) and op.name() not in _KNOWN_PARTS:
        return False
    return not any(argument.kwarg_only and "Tensor" in str(argument.type) for argument in op._schema.arguments)
