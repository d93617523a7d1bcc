"""What is done about the graph of a call without making the call: prepare, unpin, evict."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from graphreplay.attributes import AttributeSnapshot
from graphreplay.capture import capturing_here, rehearse
from graphreplay.entry import Entry
from graphreplay.request import CallOptions, Request
from graphreplay.together import Failure

if TYPE_CHECKING:
    from graphreplay.forward import GraphedForward


def prepare(graphed: GraphedForward, kwargs: dict[str, Any], options: CallOptions) -> bool:
    """See ``GraphedForward.prepare``: the road of a call, with a rehearsal in the place of its forward."""
    graphed._check_usable()
    if capturing_here() or graphed._is_capturing():
        return _not_prepared(graphed, "called inside another capture")
    graphed.peers.check()
    if graphed.disabled_reason is not None:
        return _not_prepared(graphed, graphed.disabled_reason)
    call = graphed.peers.next_call()
    rehearsal = f"{call}, rehearsal"
    try:
        request = graphed._request(kwargs, options, ahead=True)
    except BaseException as error:
        graphed.peers.excuse(rehearsal, f"its call raised {type(error).__name__}: {error}")
        raise
    if isinstance(request, str):
        graphed.peers.excuse(rehearsal, request)
        return _not_prepared(graphed, request)
    with graphed.pool.lock:
        found = graphed._look_up(request)
        if isinstance(found, Entry):  # which a replay would check
            changed = graphed._drop_if_changed()
            found = graphed._missed(request, changed) if changed else found
        if isinstance(found, str):
            graphed.peers.excuse(rehearsal, found)
        if found is None:
            attributes = AttributeSnapshot(graphed._watched().modules)
            try:
                rehearse(graphed, request, graphed._watched(), graphed._ranks(request, rehearsal))
            except Failure as failure:
                graphed._settle(failure, request)
                found = str(failure)
            except BaseException as error:
                graphed.peers.excuse(call, f"its forward raised {type(error).__name__}: {error}")
                raise
            else:
                found = graphed._capture(request, call)
            if graphed.disabled_reason is not None:
                attributes.restore()  # what the rehearsal counted or stored in Python
        if graphed._cache.get(request.key) is None:
            reason = found if isinstance(found, str) else graphed._refused.get(request.key, "evicted")
            return _not_prepared(graphed, reason)
        if options.pin:
            graphed._cache.pin(request.key)
        return True


def _not_prepared(graphed: GraphedForward, reason: str) -> bool:
    graphed._stats.miss(f"not prepared: {reason}")
    return False


def unpin(graphed: GraphedForward, kwargs: dict[str, Any], options: CallOptions) -> bool:
    """See ``GraphedForward.unpin``."""
    return _at_key(graphed, kwargs, options, graphed._cache.unpin)


def evict(graphed: GraphedForward, kwargs: dict[str, Any], options: CallOptions) -> bool:
    """See ``GraphedForward.evict``."""
    return _at_key(graphed, kwargs, options, graphed._cache.evict)


def _at_key(
    graphed: GraphedForward, kwargs: dict[str, Any], options: CallOptions, do: Callable[[Hashable], bool]
) -> bool:
    graphed._check_usable()
    request = graphed._request(kwargs, options)
    with graphed.pool.lock:
        return isinstance(request, Request) and do(request.key)
