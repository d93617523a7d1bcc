"""Operators of torch.distributed: which groups they run on, and what they write."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from graphreplay.errors import CaptureError

COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of the operators of torch.distributed."""

_INTO_FIRST = frozenset(
    {
        "allgather_",
        "_allgather_base_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "gather_",
        "scatter_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_",
        "alltoall_",
        "alltoall_base_",
    }
)
"""Collectives that write their first argument alone; others write, or may write, all of them."""

_ONLY_READ = frozenset({"send", "barrier", "monitored_barrier_"})


class ForeignCollectiveError(CaptureError):
    """The forward runs collectives that its wrapper may not capture."""


def written_by_collective(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those arguments of a collective of ``c10d`` that it may write."""
    name = op._schema.name.removeprefix("c10d::")
    return args[:1] if name in _INTO_FIRST else () if name in _ONLY_READ else args


def process_groups(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dist.ProcessGroup]:
    """The process groups among an operator's arguments: ``c10d`` takes script objects, and ``_c10d_functional`` names.
    What is no group of this process is left out."""
    groups = []
    for arg in tree_leaves((args, kwargs)):
        if isinstance(arg, dist.ProcessGroup):
            groups.append(arg)
        elif isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            groups.append(dist.ProcessGroup.unbox(arg))
        elif isinstance(arg, str):
            with suppress(RuntimeError, LookupError, ValueError):  # the name of an operation, such as "sum"
                groups.append(_resolve_process_group(arg))  # type: ignore[arg-type]
    return groups
