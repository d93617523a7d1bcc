"""Everything that bench compares: eager calls, graphs made by hand, what torch and tensordict offer, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphreplay import get_graphed_forward_cls
from graphreplay_harness.bench_handmade import (
    Call,
    Forward,
    HandWrittenLoop,
    SeedStyleWrapper,
    capture,
    cloned,
    leaves,
)

EAGER = "eager"
BARE = "bare replay"
LOOP = "hand-written loop"
SEED = "seed-style wrapper"
CALLABLES = "make_graphed_callables"
COMPILED = "compile, cudagraphs"
REDUCED = "compile, reduce-overhead"
TENSORDICT = "CudaGraphModule"
OURS = "ours"
UNCHECKED = "ours, check_module=False"
LENT = "ours, clone_outputs=False"
VERIFIED = "ours, verify=always"

OURS_ALL = (OURS, UNCHECKED, LENT, VERIFIED)
CONTENDERS = (EAGER, BARE, LOOP, SEED, CALLABLES, COMPILED, REDUCED, TENSORDICT, *OURS_ALL)
BUILT_FIRST = (COMPILED, REDUCED)
"""A recording of theirs frees the cuBLAS workspaces of the process, which graphs captured before it would go on using.
"""

PEERS = (SEED, CALLABLES, COMPILED, REDUCED, TENSORDICT)
"""Those that do the same job as ours."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far a result may be from the eager one, relative to the largest value."""


class Unavailable(Exception):
    """A contender cannot run here; the message says why."""


class WrongResult(Exception):
    """A contender gives something other than the eager forward."""


@dataclass(frozen=True)
class Contender:
    """One way to run the forward."""

    call: Callable[[Call], Any]
    stage: Callable[[Call], object] = lambda call: None
    """Gives the inputs to one that only replays."""
    why_eager: Callable[[], str | None] = lambda: None
    """Why calls ran eagerly, if some did that should not."""
    close: Callable[[], None] = lambda: None


def make(name: str, forward: Forward, example: Call, device: torch.device) -> Contender:
    """Builds a contender for a forward.

    Raises:
        Unavailable: it does not run on this device, or is not installed.
    """
    return _MAKERS[name](forward, example, device)


def make_all(
    names: Sequence[str],
    forward: Forward,
    calls: Sequence[Call],
    device: torch.device,
    say: Callable[[str], None],
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Builds contenders and compares what they return with the eager forward: bit for bit on a CPU, and elsewhere up to
    rounding, since kernels may be fused there, or chosen anew on another stream.

    Returns:
        Those that can be measured, and why the others are left out.
    """
    ready: dict[str, Contender] = {}
    left_out: dict[str, str] = {}
    expected = [forward(**call.kwargs) for call in calls]
    for name in sorted(names, key=lambda name: name not in BUILT_FIRST):
        say(f"building {name}, comparing it with eager")
        contender = None
        try:
            contender = make(name, forward, calls[0], device)
            check(contender, calls, expected, exact=device.type == "cpu")
        except Exception as error:  # whatever one of them raises is its own affair; the others go on
            if contender is not None:
                contender.close()
            first_line = (str(error).splitlines() or [""])[0]
            known = isinstance(error, (Unavailable, WrongResult))
            left_out[name] = first_line if known else f"{type(error).__name__}: {first_line}"
            say(f"left out: {name}: {left_out[name]}")
        else:
            ready[name] = contender
    return {name: ready[name] for name in names if name in ready}, left_out


def check(contender: Contender, calls: Sequence[Call], expected: Sequence[Any], *, exact: bool) -> None:
    """Calls the contender with each and compares.

    Raises:
        WrongResult: a result differs.
        Unavailable: it runs eagerly.
    """
    for _ in range(2):  # some warm up or capture in their first calls
        results = []
        for call in calls:
            contender.stage(call)
            results.append(cloned(contender.call(call)))  # some overwrite them in the next call
        wrong = sum(
            not same(ours, right, exact)
            for mine, theirs in zip(results, expected, strict=True)
            for ours, right in zip(leaves(mine), leaves(theirs), strict=True)
        )
        if wrong:
            raise WrongResult(f"{wrong} of the results of {len(calls)} calls differ from the eager ones")
    why_eager = contender.why_eager()
    if why_eager is not None:
        raise Unavailable(f"it runs eagerly: {why_eager}")


def same(ours: Tensor, right: Tensor, exact: bool) -> bool:
    """Whether a result is what the eager forward gives."""
    if exact or ours.shape != right.shape:
        return torch.equal(ours, right)
    difference = (ours.float() - right.float()).abs().max()
    return bool(difference <= TOLERANCE[right.dtype] * right.float().abs().max())


def _eager(forward: Forward, example: Call, device: torch.device) -> Contender:
    return Contender(lambda call: forward(**call.kwargs))


def _bare(forward: Forward, example: Call, device: torch.device) -> Contender:
    captured = capture(forward, example.kwargs, device)

    def replay(call: Call) -> Any:
        captured.replay()
        return captured.result

    return Contender(replay, stage=lambda call: torch._foreach_copy_(captured.statics, call.tensors))


def _loop(forward: Forward, example: Call, device: torch.device) -> Contender:
    loop = HandWrittenLoop(capture(forward, example.kwargs, device))
    return Contender(lambda call: loop(call.tensors))


def _seed(forward: Forward, example: Call, device: torch.device) -> Contender:
    wrapper = SeedStyleWrapper(forward, device)
    return Contender(lambda call: wrapper(**call.kwargs))


def _callables(forward: Forward, example: Call, device: torch.device) -> Contender:
    _need_cuda(device)

    def positional(kwargs: dict[str, Any]) -> Any:
        return forward(**kwargs)

    # Of a function, and not of the module, whose forward it would replace under everyone else's feet.
    graphed: Any = torch.cuda.make_graphed_callables(positional, (cloned(example.kwargs),))
    return Contender(lambda call: graphed(call.kwargs))


def _compiled(forward: Forward, example: Call, device: torch.device, **how: str) -> Contender:
    _need_cuda(device)
    compiled: Any = torch.compile(forward, dynamic=False, **how)  # type: ignore[call-overload]
    return Contender(lambda call: compiled(**call.kwargs))


def _tensordict(forward: Forward, example: Call, device: torch.device) -> Contender:
    _need_cuda(device)
    try:
        from tensordict.nn import CudaGraphModule
    except ImportError as error:
        raise Unavailable("tensordict is not installed") from error
    graphed = CudaGraphModule(forward)
    return Contender(lambda call: graphed(**call.kwargs))


def _ours(forward: Forward, example: Call, device: torch.device, **options: Any) -> Contender:
    graphed = get_graphed_forward_cls(device)(forward, device=device, **options)

    def why_eager() -> str | None:
        return next(iter(graphed.stats()["eager_reasons"]), None)

    return Contender(lambda call: graphed(**call.kwargs), why_eager=why_eager, close=graphed.close)


def _need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("it needs a CUDA device")


_MAKERS: dict[str, Callable[[Forward, Call, torch.device], Contender]] = {
    EAGER: _eager,
    BARE: _bare,
    LOOP: _loop,
    SEED: _seed,
    CALLABLES: _callables,
    COMPILED: partial(_compiled, backend="cudagraphs"),
    REDUCED: partial(_compiled, mode="reduce-overhead"),
    TENSORDICT: _tensordict,
    OURS: _ours,
    UNCHECKED: partial(_ours, check_module=False),
    LENT: partial(_ours, clone_outputs=False),
    VERIFIED: partial(_ours, verify="always"),
}
