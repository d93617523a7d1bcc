"""Stops capturing for a value that is new on every call, such as a timestep passed as a Python float."""

from __future__ import annotations

from collections import deque
from itertools import islice

from graphreplay.signature import Signature, differences, is_tensor_node

LIMIT = 16
"""Graphs in a row that differ in one value and were never replayed, before further values of it run eagerly."""


class ChurnGuard:
    """Watches the signatures of captures in the order in which they happen."""

    def __init__(self) -> None:
        self._row: list[Signature] = []
        self._path = ""
        self._banned: deque[tuple[Signature, str]] = deque(maxlen=64)

    def refusal(self, signature: Signature) -> str | None:
        """Why a call of this signature should not be captured, or None."""
        for example, path in self._banned:
            if self._only_difference(example, signature) in (path, ""):
                return (
                    f"{path} took {LIMIT} values in a row that never came back; "
                    "pass it as a tensor on the device, so that its value is copied and not part of the key"
                )
        return None

    def captured(self, signature: Signature) -> str | None:
        """Notes a capture. Returns the path of a value that is not captured any more from now on, if one is."""
        path = self._only_difference(self._row[-1], signature) if self._row else None
        if not path or (len(self._row) > 1 and path != self._path):
            self._row = [signature]
            return None
        self._path = path
        self._row.append(signature)
        if len(self._row) < LIMIT:
            return None
        self._banned.append((signature, path))
        self._row = []
        return path

    def replayed(self, signature: Signature) -> None:
        """Notes the first replay of a graph: its value did come back."""
        if signature in self._row:
            self._row = []

    @staticmethod
    def _only_difference(a: Signature, b: Signature) -> str | None:
        """The path of the one value in which two signatures differ, "" if they are equal, None otherwise."""
        found = list(islice(differences(a, b), 2))
        if not found:
            return ""
        path, was, now = found[0]
        return None if len(found) > 1 or is_tensor_node(was) or is_tensor_node(now) else path
