"""Any sequence of calls, changes of the module, failures and evictions: results, buffers and kwargs as without graphs.

The plain module beside it is the model. After each step every output that was ever returned is still what it was, and
no more graphs are kept than allowed.
"""

import contextlib
import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from graphreplay import ReferenceGraphedForward
from graphreplay.testing.contract_twin import Twin, assert_same
from graphreplay.testing.zoo import rows

MAX_ENTRIES = 3
WIDTH = 8
NEVER_CAPTURED = 6
"""Rows of calls that always fail."""


class Layered(nn.Module):
    """Linear layers, one of them tied, dropout, a norm and a step counter; fails when told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, *, x, y=None, scale=1.0, bump=False):
        self.steps.add_(1)
        if bump:
            x.add_(1)
        hidden = self.dropout(self.norm(self.first(x).relu())) * scale
        if y is not None:
            hidden = hidden + y
        return {"hidden": hidden, "view": hidden[:1], "out": self.tied(self.second(hidden))}


def _assign(module):
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()}, assign=True)


CHANGES = {
    "in place": lambda module: module.first.weight.mul_(-0.5),
    "data": lambda module: setattr(module.second.weight, "data", torch.randn(WIDTH, WIDTH)),
    "parameter": lambda module: setattr(module.second, "bias", nn.Parameter(torch.randn(WIDTH))),
    "untied": lambda module: setattr(module.tied, "weight", nn.Parameter(torch.randn(WIDTH, WIDTH))),
    "submodule": lambda module: setattr(module, "tied", nn.Linear(WIDTH, WIDTH)),
    "assign": _assign,
    "buffer": lambda module: setattr(module, "steps", torch.full((), 5.0)),
    "train": nn.Module.train,
    "eval": nn.Module.eval,
    "rate": lambda module: setattr(module, "dropout", nn.Dropout(0.25).train(module.training)),
}


class Failing(contextlib.AbstractContextManager):
    """A capture context that raises, once, on the way in or out."""

    at = None

    def __enter__(self):
        if Failing.at == "enter":
            Failing.at = None
            raise ValueError("cannot enter")

    def __exit__(self, *_):
        if Failing.at == "exit":
            Failing.at = None
            raise ValueError("cannot leave")


class GraphsAgainstEager(RuleBasedStateMachine):
    @initialize(verify=st.sampled_from(["off", "first"]), inference=st.booleans())
    def start(self, verify, inference):
        Failing.at = None
        self.mode = torch.inference_mode if inference else torch.no_grad
        self.verify = verify
        self.plain = Layered()
        self.module = copy.deepcopy(self.plain)
        self.held = []
        self.armed = False
        self.last = None
        for module in (self.plain, self.module):
            module.second.register_forward_pre_hook(self._fail)
        self._wrap()

    def _fail(self, *_):
        if self.armed:
            raise ArithmeticError("told to")

    def _wrap(self):
        graphed = ReferenceGraphedForward(
            self.module, device="cpu", max_entries=MAX_ENTRIES, capture_context=Failing, verify=self.verify
        )
        self.graphed = graphed
        self.twin = Twin(graphed, self.plain, "cpu")
        self.pinned = 0

    # ---------------------------------------------------------------------------------------- calls

    # Most calls are alike, so that they replay.
    @rule(
        count=st.sampled_from([2, 2, 2, 3, 4]),
        seed=st.integers(0, 3),
        scale=st.sampled_from([1.0, 1.0, 1.0, 1.0, 2.0]),
        variant=st.sampled_from([None, None, None, None, "lora"]),
        others=st.sampled_from(["none", "none", "none", "another", "same", "view"]),
        bump=st.sampled_from([False, False, False, True]),
        grad=st.sampled_from([False, False, False, False, True]),
    )
    def call(self, count, seed, scale, variant, others, bump, grad):
        self._call(count, seed, scale, variant, others, bump, grad)
        self.last = (count, scale, variant, others, bump, grad)

    @precondition(lambda self: self.last is not None)
    @rule(
        seeds=st.lists(st.integers(0, 3), min_size=2, max_size=5),
        others=st.sampled_from(["as before", "as before", "another", "same", "view"]),
    )
    def call_again(self, seeds, others):
        if not self.graphed.enabled:
            assert "cannot " in self.graphed.disabled_reason
            self.graphed.close()
            self._wrap()
        count, scale, variant, before, bump, grad = self.last
        if before == "none" or others == "as before":
            others = before
        for seed in seeds:
            self._call(count, seed, scale, variant, others, bump, grad)

    def _call(self, count, seed, scale, variant, others, bump, grad):
        x = rows(count, seed)
        kwargs = {"x": x, "scale": scale, "bump": bump}
        if others != "none":
            kwargs["y"] = {"another": rows(count, seed + 7), "same": x, "view": x[:]}[others]
        torch.manual_seed(seed)
        with contextlib.nullcontext() if grad and not bump else self.mode():
            out = self.twin.call(kwargs, variant=variant)
        self.held.append((out, copy.deepcopy({name: tensor.detach() for name, tensor in out.items()})))
        assert out["view"].untyped_storage()._cdata == out["hidden"].untyped_storage()._cdata

    @precondition(lambda self: self.held)
    @rule()
    def call_with_an_earlier_output(self):
        x = self.held[-1][0]["hidden"].detach()
        with self.mode():
            self.twin(x=x)

    @rule(seed=st.integers(0, 3))
    def a_forward_that_raises_reaches_the_caller(self, seed):
        self.armed = True
        with self.mode():
            for forward in (self.plain, self.graphed):
                torch.manual_seed(seed)
                with pytest.raises(ArithmeticError, match="told to"):
                    forward(x=rows(NEVER_CAPTURED, seed))  # a replay runs no Python, and so could not raise
        self.armed = False
        self.twin.check_state()

    @rule(count=st.integers(2, 4), pin=st.booleans())
    def prepare(self, count, pin):
        before = copy.deepcopy(self.module.state_dict())
        state = torch.get_rng_state()
        with self.mode():
            there = self.graphed.prepare(x=rows(count, 0), pin=pin)
        assert there or not self.graphed.enabled
        assert_same(dict(self.module.state_dict()), dict(before))
        assert_same(torch.get_rng_state(), state)

    # -------------------------------------------------------------------------------------- changes

    @rule(how=st.sampled_from([*CHANGES]))
    def change_the_module(self, how):
        for module in (self.plain, self.module):
            torch.manual_seed(11)
            with torch.no_grad():
                CHANGES[how](module)

    # ------------------------------------------------------------------------------------ the store

    @rule(count=st.integers(2, 4), what=st.sampled_from(["evict", "unpin", "reset"]))
    def drop(self, count, what):
        if what == "reset":
            self.graphed.reset()
            assert self.graphed.num_graphs == 0
        else:
            with self.mode():
                getattr(self.graphed, what)(x=rows(count, 0))

    @rule(at=st.sampled_from([None, None, None, "enter", "exit"]))
    def let_the_next_capture_fail(self, at):
        Failing.at = at

    @invariant()
    def nothing_grows_and_nothing_changes(self):
        stats = self.graphed.stats()
        assert stats["graphs"] <= MAX_ENTRIES + stats["pinned"]
        assert stats["enabled"] or stats["graphs"] == 0
        for out, was in self.held:
            assert_same({name: tensor.detach() for name, tensor in out.items()}, was)

    def teardown(self):
        self.graphed.close()


TestGraphsAgainstEager = GraphsAgainstEager.TestCase
# An example is dozens of calls.
TestGraphsAgainstEager.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=30)
