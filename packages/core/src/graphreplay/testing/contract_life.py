"""Contract: the end of a wrapper, and calls that meet it, or the wrapper itself, on the way.

| kind | outcome | test |
| --- | --- | --- |
| copy, pickle | error | test_copies_are_refused |
| use after close, or in a forked child | error | test_closed_*, test_forked_* |
| disable, reset | eager from then on, forget | test_disable_*, test_reset_* |
| a call that waits while another thread closes or disables | error or eager, no graph | test_call_that_waited_* |
| a forward that closes, disables or calls its own wrapper | its result, no graph once ended | test_forward_that_* |
| a warning that is an error | the result is kept | test_warnings_as_errors_* |
| a pool shared by two threads | as eager | test_shared_pool_of_two_threads |
"""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import graphreplay
from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import ContractBase, assert_same, in_child


class _NoticedLock:
    """A lock that tells when a certain thread comes to it."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.thread: threading.Thread | None = None
        self.came = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is self.thread:
            self.came.set()
        self.lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.lock.release()


class LifeContract(ContractBase):
    """How a wrapper ends."""

    def test_reset_forgets_graphs_and_pins(self) -> None:
        graphed = self.wrap(lambda *, x: x + 1)
        graphed(x=self.x(1), pin=True)
        graphed(x=self.x(2))
        graphed.reset()
        stats = graphed.stats()
        assert (stats["graphs"], stats["pinned"], stats["bytes"], stats["captures"]) == (0, 0, 0, 2)
        for seed in range(2):
            assert_same(graphed(x=self.x(1, seed)), self.x(1, seed) + 1)
        assert (graphed.captures, graphed.stats()["replays"]) == (3, 1)

    def test_disable_is_eager_from_then_on(self) -> None:
        graphed = self.wrap(lambda *, x: x + 1)
        graphed(x=self.x())
        graphed.disable("the first reason")
        graphed.disable("another reason")
        graphed.reset()
        assert_same(graphed(x=self.x()), self.x() + 1)
        stats = graphed.stats()
        assert (stats["graphs"], stats["enabled"], stats["disabled_reason"]) == (0, False, "the first reason")
        assert stats["eager_reasons"] == {"the first reason": 1}

    def test_closed_wrapper_raises(self) -> None:
        with self.wrap(lambda *, x: x + 1) as graphed:
            graphed(x=self.x())
        graphed.close()
        assert graphed.num_graphs == 0
        for use in (graphed, graphed.prepare, graphed.evict, graphed.unpin, graphed.options()):
            with pytest.raises(graphreplay.ClosedError):
                use(x=self.x())
        with pytest.raises(graphreplay.ClosedError), graphed:
            pass
        assert graphed.stats()["captures"] == 1

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
    def test_copies_are_refused(self, duplicate: Any) -> None:
        graphed = self.wrap(zoo.MLP())
        with pytest.raises(graphreplay.NotCopyableError, match="module"):
            duplicate(graphed)

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the process has threads, the child only raises
    def test_forked_wrapper_raises_in_the_child(self) -> None:
        graphed = self.wrap(lambda *, x: x + 1)
        x = self.x()
        graphed(x=x)

        def child() -> None:
            with pytest.raises(graphreplay.ForkedError):
                graphed(x=x)

        assert in_child(child) == 0
        assert_same(graphed(x=x), x + 1)
        assert graphed.stats()["replays"] == 1

    @pytest.mark.parametrize("end", ["close", "disable"])
    def test_call_that_waited_while_another_thread_ended_it(self, end: str) -> None:
        graphed = self.wrap(lambda *, x: x + 1)
        x, outcome = self.x(5), []

        def call() -> None:
            try:
                with torch.no_grad():
                    outcome.append(graphed(x=x))
            except graphreplay.GraphReplayError as error:
                outcome.append(error)

        thread = threading.Thread(target=call)
        with torch.no_grad():
            graphed(x=self.x())  # so that the next call takes the lock for its turn alone
        lock = graphed.pool.lock = _NoticedLock(graphed.pool.lock)
        with lock:  # as while another call of the pool runs
            lock.thread = thread
            thread.start()
            assert lock.came.wait(60)
            graphed.close() if end == "close" else graphed.disable("ended meanwhile")
        thread.join()
        (result,) = outcome
        if end == "close":
            assert isinstance(result, graphreplay.ClosedError)
        else:
            assert_same(result, x + 1)
            assert graphed.stats()["eager_reasons"] == {"ended meanwhile": 1}
        assert (graphed.num_graphs, graphed.captures) == (0, 1)

    @pytest.mark.parametrize("end", ["close", "disable"])
    def test_forward_that_ends_its_own_wrapper_leaves_no_graph(self, end: str) -> None:
        def forward(*, x: Tensor) -> Tensor:
            graphed.close() if end == "close" else graphed.disable("from inside")
            return x * 2

        graphed = self.wrap(forward)
        with torch.no_grad():
            assert_same(graphed(x=self.x()), self.x() * 2)
            assert (graphed.num_graphs, graphed.captures) == (0, 0)
            if end == "close":
                with pytest.raises(graphreplay.ClosedError):
                    graphed(x=self.x())
            else:
                assert_same(graphed(x=self.x(seed=1)), self.x(seed=1) * 2)
                assert graphed.stats()["eager_reasons"] == {"from inside": 1}

    def test_forward_that_calls_its_own_wrapper_keeps_its_result(self) -> None:
        inside = [False]

        def forward(*, x: Tensor) -> Tensor:
            if inside[0]:
                return x * 2
            inside[0] = True
            try:
                result: Tensor = graphed(x=x)
                return result + 1
            finally:
                inside[0] = False

        graphed = self.wrap(forward)
        with torch.no_grad():
            assert_same(graphed(x=self.x()), self.x() * 2 + 1)
            assert (graphed.num_graphs, graphed.captures) == (1, 1)
        assert graphed.enabled

    @pytest.mark.parametrize("call", ["__call__", "prepare"])
    def test_warnings_as_errors_lose_no_result(self, call: str) -> None:
        graphed = self.wrap(lambda *, x: x.add_(1), max_entries=1)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error", graphreplay.GraphReplayWarning)
            graphed(x=self.x(1), pin=True)
            x = self.x(2)
            result = getattr(graphed, call)(x=x, pin=True)
            if call == "prepare":
                assert result is True
                result = graphed(x=x)
            assert_same(result, self.x(2) + 1)
            assert_same(x, self.x(2) + 1, "the input, which the forward writes once")
        assert graphed.stats()["pinned"] == 2

    def test_shared_pool_of_two_threads(self) -> None:
        pool = graphreplay.GraphPool()
        twins = [self.twin(zoo.MLP(), pool=pool), self.twin(zoo.Attention(), pool=pool)]
        inputs = {(count, seed): self.x(count, seed) for count in (2, 3) for seed in range(4)}
        with torch.no_grad():
            expected = [{at: twin.plain(x=x) for at, x in inputs.items()} for twin in twins]
        results: list[list[Any]] = [[], []]
        start = threading.Barrier(2)

        def work(number: int) -> None:
            start.wait()
            with torch.no_grad():
                for call in range(40):
                    at = (2 + (call + number) % 2, call % 4)
                    results[number].append((at, twins[number].graphed(x=inputs[at])))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for twin, found, right in zip(twins, results, expected, strict=True):
            assert len(found) == 40
            for at, result in found:
                assert_same(result, right[at], f"rows and seed {at}")
            assert twin.counts() == (2, 38, 0)
