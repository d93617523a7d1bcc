"""Contract: process state that changes what a forward computes.

| kind | outcome | test |
| --- | --- | --- |
| grad and inference mode, autocast, default dtype, determinism | keyed | test_process_state_is_keyed |
| any switch that chooses a kernel | one graph a state, replayed when the state comes back | test_switch_is_keyed |
| default devices, one inside another | keyed by the innermost | test_default_device_is_keyed |
| dispatch modes, functorch, tracing | eager | test_observers_see_every_operator |
| function modes | eager | test_function_modes_act |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphreplay.testing.contract_twin import ContractBase, assert_same


@contextmanager
def _set(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """Sets a switch for the body, to a value that it did not have."""
    before = read()
    assert before != value
    write(value)
    try:
        assert read() == value
        yield
    finally:
        write(before)


def _flag(path: str, value: Any) -> Callable[[], AbstractContextManager[None]]:
    """``torch.backends.<path>`` set for a body."""
    owner, _, name = path.rpartition(".")

    def context() -> AbstractContextManager[None]:
        place = attrgetter(owner)(torch.backends)
        return _set(lambda: getattr(place, name), lambda new: setattr(place, name, new), value)

    return context


def _attention(kind: str) -> Callable[[], AbstractContextManager[None]]:
    """One kind of attention kernel off for a body."""
    cuda = torch.backends.cuda
    return partial(_set, getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, f"enable_{kind}_sdp"), False)


def _determinism(warn_only: bool) -> AbstractContextManager[None]:
    def read() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def write(mode: tuple[bool, bool]) -> None:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])

    return _set(read, write, (True, warn_only))


def _default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _set(torch.get_default_dtype, torch.set_default_dtype, dtype)


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default_dtype": partial(_default_dtype, torch.float64),
    "default_device": partial(torch.device, "meta"),
    "deterministic": partial(_determinism, False),
    "deterministic_warn_only": partial(_determinism, True),
    **{
        f"{library}_precision": _flag(f"{library}.fp32_precision", "ieee")
        for library in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv")
    },
    "mkldnn": _flag("mkldnn.enabled", False),
    "mkldnn_deterministic": _flag("mkldnn.deterministic", True),
    "cudnn": _flag("cudnn.enabled", False),
    "cudnn_benchmark": _flag("cudnn.benchmark", True),
    "cudnn_deterministic": _flag("cudnn.deterministic", True),
    "fp16_reduction": _flag("cuda.matmul.allow_fp16_reduced_precision_reduction", False),
    "bf16_reduction": _flag("cuda.matmul.allow_bf16_reduced_precision_reduction", False),
    "fp16_accumulation": _flag("cuda.matmul.allow_fp16_accumulation", True),
    **{f"{kind}_attention": _attention(kind) for kind in ("flash", "mem_efficient", "math", "cudnn")},
    "math_attention_reduction": partial(
        _set,
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        True,
    ),
    "fused_layers": partial(
        _set, torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
    ),
}


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Cosines(TorchFunctionMode):
    """Turns sines into cosines."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


class AmbientContract(ContractBase):
    """What the process says beside the kwargs and the module."""

    @pytest.mark.filterwarnings("ignore:Deterministic behavior:UserWarning")  # cuBLAS, where it is not set up for it
    def test_process_state_is_keyed(self) -> None:
        kind = torch.device(self.device).type
        states: list[Callable[[], AbstractContextManager[Any]]] = [
            nullcontext,
            torch.no_grad,
            torch.inference_mode,
            lambda: torch.autocast(kind, dtype=torch.bfloat16),
            lambda: torch.autocast(kind, dtype=torch.float16),
            lambda: torch.autocast(kind, dtype=torch.float16, cache_enabled=False),
            SWITCHES["default_dtype"],
            SWITCHES["deterministic_warn_only"],
        ]
        twin = self.twin(lambda *, x: (x @ x.t(), torch.ones(2, device=x.device), x.sum()))
        for seed in range(2):
            for state in states:
                with state():
                    result = twin(x=self.x(seed=seed))
                    assert result[2].is_inference() == torch.is_inference_mode_enabled()
        assert twin.counts() == (8, 8, 0)

        def forward(*, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(kind):
                return x @ x.t()

        twin = self.twin(forward)
        for seed in range(2):
            for dtype in (torch.bfloat16, torch.float16):
                with torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=False):
                    assert twin(x=self.x(seed=seed)).dtype is dtype
        assert twin.counts() == (2, 2, 0)

    @pytest.mark.parametrize("switch", SWITCHES)
    def test_switch_is_keyed(self, switch: str) -> None:
        if not self._counts(switch):
            pytest.skip("mkldnn runs nothing on CUDA devices")
        twin = self.twin(lambda *, x: x * 2)
        with torch.no_grad():
            for seed, (captures, replays) in enumerate([(1, 1), (2, 2), (2, 4), (2, 6)]):
                x, other = self.x(seed=seed), self.x(seed=seed + 10)
                with SWITCHES[switch]() if seed % 2 else nullcontext():
                    twin(x=x)
                    twin(x=other)
                assert twin.counts() == (captures, replays, 0), twin.graphed.stats()

    def test_switches_differ_from_one_another(self) -> None:
        switches = [switch for name, switch in SWITCHES.items() if self._counts(name)]
        twin = self.twin(lambda *, x: x * 2, max_entries=2 * len(switches))
        with torch.no_grad():
            for seed in range(2):
                for switch in switches:
                    x = self.x(seed=seed)
                    with switch():
                        twin(x=x)
        assert twin.counts() == (len(switches), len(switches), 0)

    def _counts(self, switch: str) -> bool:
        """Whether it changes what runs on the device."""
        return torch.device(self.device).type != "cuda" or not switch.startswith("mkldnn")

    def test_default_device_is_keyed(self) -> None:
        graphed = self.wrap(lambda *, x: (x * 2, torch.zeros(2)))
        inputs = [self.x(seed=seed) for seed in range(3)]
        with torch.no_grad(), torch.device(self.device):
            for x in inputs:
                assert_same(graphed(x=x), (x * 2, torch.zeros(2)))
            with torch.device("meta"):
                for x in inputs[:2]:
                    assert graphed(x=x)[1].is_meta
            assert_same(graphed(x=x), (x * 2, torch.zeros(2)))
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (1, 3, 1)
        (reason,) = stats["eager_reasons"]
        assert "meta tensor" in reason

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, at the first dual tensor
    def test_observers_see_every_operator(self) -> None:
        graphed = self.wrap(lambda *, x: x.sin() * 2)
        x = self.x()
        with torch.no_grad():
            graphed(x=x)
            graphed(x=x)
            with _Seen() as seen:
                graphed(x=x)
            assert seen.count == 2
            assert_same(torch.func.vmap(lambda row: graphed(x=row))(x), x.sin() * 2)
        tangents = torch.func.jvp(lambda x: graphed(x=x), (x,), (torch.ones_like(x),))[1]
        assert_same(tangents.detach(), x.cos() * 2)
        assert (graphed.captures, graphed.stats()["replays"], graphed.stats()["eager_calls"]) == (1, 1, 3)

    def test_function_modes_act(self) -> None:
        graphed = self.wrap(lambda *, x: torch.sin(x))
        with torch.no_grad():
            graphed(x=self.x())
            graphed(x=self.x())
            for _ in range(3):
                with _Cosines():
                    assert_same(graphed(x=self.x()), self.x().cos())
                assert_same(graphed(x=self.x()), self.x().sin())
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (1, 4, 3)
        (reason,) = stats["eager_reasons"]
        assert "function mode" in reason
