"""Operators of which an observer needs to see the tensors that they are given and return, and nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._ops import OpOverload

from graphreplay.generators import may_draw, takes_generators
from graphreplay.hostsync import may_sync
from graphreplay.opmode import is_composite, may_write, namespace_of, per_op

KNOWN_PARTS = frozenset(
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
        "aten::softmax.int",
        "aten::log_softmax.int",
        "aten::conv1d",
        "aten::conv2d",
        "aten::einsum",
        "aten::pad",
        "aten::where.Scalar",
        "aten::where.ScalarOther",
        "aten::where.ScalarSelf",
        "aten::repeat_interleave.self_int",
    }
)
"""Composite operators whose parts are known: none of them writes what the operator is given, draws, or waits for the
device. So they run whole, as without a mode, in a fraction of the time that their parts take one by one. Listed are
those that networks run most."""


class PlainOp(NamedTuple):
    """What is known of an operator that, whatever it is given, at most reads the tensors among its positional
    arguments: it writes none, draws no random numbers and does not make the host wait, unless for tensors of several
    devices."""

    whole: bool
    """Whether it is a composite one that runs whole."""


@per_op
def plain_op(op: Any) -> PlainOp | None:
    """None where an operator does more, or may do more."""
    if not isinstance(op, OpOverload) or namespace_of(op) != "aten":
        return None
    if may_write(op) or may_sync(op) or may_draw(op, ()) or takes_generators(op):
        return None
    whole = is_composite(op)
    if whole and op.name() not in KNOWN_PARTS:
        return None
    if any(argument.kwarg_only and "Tensor" in str(argument.type) for argument in op._schema.arguments):
        return None
    return PlainOp(whole)
