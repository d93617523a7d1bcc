"""A key as the other ranks of a group would write it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from graphreplay.request import Key
from graphreplay.signature import is_tensor_node
from graphreplay.values import Token


def key_digest(key: Key, device: torch.device) -> str:
    """A short text that is equal on two ranks exactly if their keys agree in all but tensor sizes.

    Ranks of one group call with the same containers, names, constants and process state, while shards may differ in
    size: of a tensor only the number of dimensions, the dtype and the device count, and the wrapper's own device is
    "self" on every rank. Types count by their names, since other processes have other type objects.
    """
    parts = (tuple(key.signature), key.ambient, bool(key.sharing), key.variant)
    return hashlib.sha256(repr(_plain(parts, device)).encode()).hexdigest()[:16]


def _plain(part: Any, device: torch.device) -> Any:
    if isinstance(part, torch.device):
        return "self" if part == device else str(part)
    if isinstance(part, type):
        return f"{part.__module__}.{part.__qualname__}"
    if isinstance(part, tuple):
        if _is_tensor(part):
            shape, _, dtype, where = part
            return ("tensor", len(shape), str(dtype), _plain(where, device))
        return tuple(_plain(item, device) for item in part)
    return repr(part)


def _is_tensor(token: Token) -> bool:
    return len(token) == 4 and isinstance(token[0], torch.Size) and is_tensor_node(token)
