"""Stops capturing for values that are new on every call, such as a timestep passed as a Python float."""

from __future__ import annotations

from collections import deque

from graphreplay.signature import Signature, differences, is_value_node

LIMIT = 16
"""Graphs in a row that differ in values alone and were never replayed, before further such values run eagerly."""

Paths = frozenset[str]


class ChurnGuard:
    """Watches the signatures of captures in the order in which they happen."""

    def __init__(self) -> None:
        self._row: list[Signature] = []
        self._paths: Paths = frozenset()
        self._banned: deque[tuple[Signature, Paths]] = deque(maxlen=64)

    def refusal(self, signature: Signature) -> str | None:
        """Why a call of this signature should not be captured, or None."""
        for example, paths in self._banned:
            changed = self._changed_values(example, signature)
            if changed is not None and changed <= paths:
                return (
                    f"{_and(paths)} took {LIMIT} values in a row that never came back; pass a tensor on the device, so "
                    "that the value is copied and not part of the key"
                )
        return None

    def captured(self, signature: Signature) -> str | None:
        """Notes a capture. Returns the paths of values that are not captured any more from now on, if there are any."""
        changed = self._changed_values(self._row[-1], signature) if self._row else None
        if not changed:
            self._row, self._paths = [signature], frozenset()
            return None
        self._row.append(signature)
        self._paths |= changed
        if len(self._row) < LIMIT:
            return None
        self._banned.append((signature, self._paths))
        self._row = []
        return _and(self._paths)

    def replayed(self, signature: Signature) -> None:
        """Notes the first replay of a graph: its value did come back."""
        if signature in self._row:
            self._row = []

    @staticmethod
    def _changed_values(a: Signature, b: Signature) -> Paths | None:
        """The paths of the values in which two signatures differ, or None if they differ in anything else."""
        found = list(differences(a, b))
        if not all(is_value_node(was) and is_value_node(now) for _, was, now in found):
            return None
        return frozenset(path for path, _, _ in found)


def _and(paths: Paths) -> str:
    return " and ".join(sorted(paths))
