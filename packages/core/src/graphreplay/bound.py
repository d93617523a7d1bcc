"""Calls with their options bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphreplay import upkeep
from graphreplay.request import CallOptions

if TYPE_CHECKING:
    from graphreplay.forward import GraphedForward


@dataclass(frozen=True, slots=True)
class BoundForward:
    """A graphed forward with its options bound, so that every keyword is one of the forward's own."""

    _graphed: GraphedForward
    _options: CallOptions

    def __call__(self, **kwargs: Any) -> Any:
        """As ``GraphedForward.__call__``."""
        return self._graphed._call(kwargs, self._options)

    def prepare(self, **kwargs: Any) -> bool:
        """As ``GraphedForward.prepare``."""
        return upkeep.prepare(self._graphed, kwargs, self._options)

    def unpin(self, **kwargs: Any) -> bool:
        """As ``GraphedForward.unpin``."""
        return upkeep.unpin(self._graphed, kwargs, self._options)

    def evict(self, **kwargs: Any) -> bool:
        """As ``GraphedForward.evict``."""
        return upkeep.evict(self._graphed, kwargs, self._options)
