"""What of a call is our own work on the host, in cases for timers and for counts of instructions.

Graphs launch nothing here: a case of a hit is all that the host does for one, but for the launch itself. Run the cases
under ``torch.inference_mode()``, as bench does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor, nn

from graphreplay import ReferenceGraphedForward, clone_static, copy_into, kwargs_signature
from graphreplay.ambient import Ambient
from graphreplay.cache import LRUCache
from graphreplay.entry import Graph, Launch
from graphreplay.plan import Plan
from graphreplay.request import Key
from graphreplay.signature import flatten
from graphreplay.weights import ModuleWatch
from graphreplay_cuda import CUDAGraphedForward
from graphreplay_harness.bench_handmade import leaves

COUNTS = (1, 15, 64)
"""Of tensors in a hit."""

PARAMETERS = 25

SHAPE = (4, 8)
"""Of every tensor."""


@dataclass(frozen=True)
class HostCase:
    """One thing that a call does on the host."""

    run: Callable[[], object]
    """Does it once. The first few times may take longer."""
    check: Callable[[], bool]
    """Whether the runs did what the case is named after, and took no other road."""


@dataclass(frozen=True)
class PackedLayout:
    """Of sequences in packed rows; no plan knows what it holds, so that each call with one has its key built."""

    rows: int
    lengths: tuple[int, ...]


class _IdleGraph:
    """A graph whose launch does nothing."""

    def __init__(self, graph: Graph) -> None:
        self.nbytes = graph.nbytes
        self._graph = graph

    def staging(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Launch:
        return _launch_nothing

    def reset(self) -> None:
        self._graph.reset()


def _launch_nothing(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """The outputs keep whatever their memory held."""


class IdleGraphedForward(ReferenceGraphedForward):
    """The reference backend with graphs that do nothing when they are replayed, which looks at tensors and modules as
    the CUDA backend does."""

    looks_of = staticmethod(CUDAGraphedForward.looks_of)
    sight_of = staticmethod(CUDAGraphedForward.sight_of)

    def _capture_graph(self, forward: Callable[[], Any]) -> Any:
        graph, outputs = super()._capture_graph(forward)
        return _IdleGraph(graph), outputs


def flat_kwargs() -> dict[str, Any]:
    """15 tensors and 5 scalars."""
    return {**{f"t{number}": torch.ones(SHAPE) for number in range(15)}, **_scalars()}


def nested_kwargs() -> dict[str, Any]:
    """15 tensors, 5 scalars and a layout, as a diffusion transformer over packed rows takes them."""
    tensors = {f"t{number}": torch.ones(SHAPE) for number in range(13)}
    rope = (torch.ones(8, 2), torch.ones(8, 2))
    return {**tensors, "rope": rope, **_scalars(), "layout": PackedLayout(207, (198, 9))}


def _scalars() -> dict[str, Any]:
    return {"seq_len": 207, "max_seqlen": 256, "scale": 1.5, "mask": None, "causal": True}


def _signature(kwargs: dict[str, Any]) -> HostCase:
    # In the reverse order, since a key is the same in any.
    expected = kwargs_signature(dict(reversed(kwargs.items())))
    return HostCase(lambda: kwargs_signature(kwargs), lambda: kwargs_signature(kwargs) == expected)


def _match(kwargs: dict[str, Any]) -> HostCase:
    ambient = Ambient("cpu")
    state = ambient.read()
    signature, leaves = flatten(kwargs)
    key = Key(signature, ambient.key(state), (), None)
    plan = Plan(key, ambient, state, kwargs, None, leaves, CUDAGraphedForward.looks_of)
    return HostCase(lambda: plan.match(state, kwargs, None), lambda: plan.match(state, kwargs, None) is not None)


def _clone_static() -> HostCase:
    kwargs = nested_kwargs()
    return HostCase(lambda: clone_static(kwargs), lambda: bool(clone_static(kwargs)["t0"].sum() == 32))


def _copy_into() -> HostCase:
    kwargs = nested_kwargs()
    static = clone_static(kwargs)
    kwargs["t0"] = torch.zeros(4, 8)
    return HostCase(lambda: copy_into(static, kwargs), lambda: bool(static["t0"].sum() == 0))


def _cache(*, full: int) -> tuple[LRUCache[Key, object], list[Key]]:
    """A full cache, with its keys and one more."""
    cache: LRUCache[Key, object] = LRUCache(full, None, lambda value: None)
    ambient = Ambient("cpu")
    state = ambient.key(ambient.read())
    keys = [Key(kwargs_signature({"x": torch.ones(1, 1 + size)}), state, (), None) for size in range(full + 1)]
    for key in keys[:full]:
        cache.put(key, object(), 1)
    return cache, keys


def _cache_hit(*, turns: int) -> HostCase:
    """Of as many keys in turn."""
    cache, keys = _cache(full=16)
    turn = cycle(keys[:turns])
    return HostCase(lambda: cache.get(next(turn)), lambda: cache.get(keys[0]) is not None and not cache.evictions)


def _cache_put() -> HostCase:
    cache, keys = _cache(full=16)
    turn, value = cycle(keys[-1:] + keys[:-1]), object()  # each time the one that went last
    return HostCase(lambda: cache.put(next(turn), value, 1), lambda: cache.evictions > 0 and len(cache) == 16)


def _module_check() -> HostCase:
    watch = ModuleWatch(_module(), CUDAGraphedForward.sight_of)
    watch.changed()  # which looks closely at first, and is quick from then on
    return HostCase(watch.changed, lambda: watch.is_untouched())


def _hit(tensors: int, *, nested: bool, check_module: bool) -> HostCase:
    return _replay(_module(), _of_tensors(tensors, nested=nested), check_module=check_module, planned=True)


def _keyed_hit() -> HostCase:
    return _replay(_sum, nested_kwargs(), check_module=True, planned=False)


def _replay(module: Callable[..., Any], kwargs: dict[str, Any], *, check_module: bool, planned: bool) -> HostCase:
    graphed = IdleGraphedForward(module, device="cpu", check_module=check_module)
    graphed(**kwargs)

    def all_replayed() -> bool:
        stats = graphed.stats()
        by_plan = bool(graphed._plans)
        return stats["captures"] == 1 and stats["replays"] > 0 and not stats["eager_calls"] and by_plan is planned

    return HostCase(lambda: graphed(**kwargs), all_replayed)


class _Module(nn.Module):
    """A chain of twelve layers and a scale, so small that valgrind soon has it run: sizes make no difference here."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(SHAPE[1], SHAPE[1]) for _ in range((PARAMETERS - 1) // 2)))
        self.scale = nn.Parameter(torch.ones(SHAPE[1]))

    def forward(self, **inputs: Any) -> Any:
        return self.layers(sum(leaves(inputs)) * self.scale)


def _of_tensors(count: int, *, nested: bool) -> dict[str, Any]:
    """So many tensors; the nested ones lie in lists in dicts in a dict."""
    tensors = [torch.ones(SHAPE) for _ in range(count)]
    if not nested:
        return {f"t{number}": tensor for number, tensor in enumerate(tensors)}
    half = (count + 1) // 2
    return {"x": {"front": {"first": tensors[0], "more": tensors[1:half]}, "back": tensors[half:]}}


def _module() -> nn.Module:
    return _Module().eval().requires_grad_(False)


def _sum(*, t0: Tensor, t1: Tensor, **_: Any) -> Tensor:
    return t0 + t1


def _hits() -> Iterator[tuple[str, Callable[[], HostCase]]]:
    for count, nested, checked in product(COUNTS, (False, True), (True, False)):
        tensors = f"{count} tensor{'s' if count > 1 else ''}, {'nested' if nested else 'flat'}"
        name = f"hit, {tensors}, {'module checked' if checked else 'check_module=False'}"
        yield name, partial(_hit, count, nested=nested, check_module=checked)


CASES: dict[str, Callable[[], HostCase]] = {
    "signature, flat": lambda: _signature(flat_kwargs()),
    "signature, nested": lambda: _signature(nested_kwargs()),
    "match, flat": lambda: _match(flat_kwargs()),
    "match, nested": lambda: _match(_of_tensors(15, nested=True)),
    "clone_static, nested": _clone_static,
    "copy_into, nested": _copy_into,
    "cache, the same key again": lambda: _cache_hit(turns=1),
    "cache, four keys in turn": lambda: _cache_hit(turns=4),
    "cache, put with eviction": _cache_put,
    "module check": _module_check,
    **dict(_hits()),
    "hit by key, nested": _keyed_hit,
}
"""What makes each case, by name. Where the name gives no number, there are 15 tensors; modules have 25 parameters."""
