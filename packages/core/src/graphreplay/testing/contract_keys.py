"""Contract: what a call is keyed by.

| kind | outcome | test |
| --- | --- | --- |
| shape, strides, dtype | keyed | test_layouts_are_keyed, test_awkward_layouts |
| tensor values | copied | test_values_are_copied |
| value that is no tensor | keyed by exact type and value | test_values_are_keyed_by_exact_type |
| containers, None | walked, rebuilt, keyed | test_trees_of_kwargs |
| dict order | result as eager in any order | test_dict_order |
| aliased inputs | sharing keyed and kept | test_sharing_* |
| nn.Parameter as a kwarg | a plain tensor | test_parameter_* |
| module state beside the kwargs | variant=, keep_alive= | test_variant_*, test_keep_alive_* |
"""

from __future__ import annotations

import enum
import weakref
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphreplay
from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import MODES, ContractBase, assert_same


class _Step(enum.IntEnum):
    ONE = 1


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::3],
    "sliced": lambda x: x[1:, 2:5],
    "expanded": lambda x: x[:1].expand(4, -1),
    "unfolded": lambda x: x.unfold(1, 4, 2),
    "channels_last": lambda x: x.reshape(1, 2, -1, 3).contiguous(memory_format=torch.channels_last),
    "empty": lambda x: x[:, :0],
    "scalar": lambda x: x[0, 0],
    "complex": lambda x: torch.complex(x, -x),
    "conjugate": lambda x: torch.complex(x, -x).conj(),
    "negative": torch._neg_view,
    "bool": lambda x: x > 0,
    "int64": lambda x: (x * 10).long(),
    "bfloat16": lambda x: x.bfloat16(),
}
VALUES = [
    1,
    True,
    1.0,
    _Step.ONE,
    np.float32(1),
    np.int64(1),
    0.0,
    -0.0,
    float("nan"),
    float("inf"),
    "1",
    b"1",
    None,
    ...,
    1j,
    torch.float32,
    torch.Size([1]),
    (1,),
    [1],
    slice(1),
    range(1),
]


class KeyContract(ContractBase):
    """From kwargs to a key."""

    def test_values_are_copied(self) -> None:
        twin = self.twin(zoo.MLP())
        with torch.no_grad():
            for seed in range(5):
                twin(x=self.x(seed=seed))
        assert twin.counts() == (1, 4, 0)

    def test_layouts_are_keyed(self) -> None:
        twin = self.twin(lambda *, x: x * 2)
        base = self.x(8)
        inputs = [base, base.t(), base[:, :4], base[:4], base.double(), base.t()[:, :4]]
        with torch.no_grad():
            for _ in range(2):
                for x in inputs:
                    twin(x=x)
        assert twin.counts() == (6, 6, 0)
        assert twin.graphed.num_graphs == 6

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_awkward_layouts(self, layout: str, mode: str) -> None:
        twin = self.twin(lambda *, x: (x + 1, x, x.flatten(), x.t() if x.dim() == 2 else x))
        with MODES[mode]():
            for seed in range(4):
                twin(x=LAYOUTS[layout](self.x(3, seed)))
        assert twin.counts() == (1, 3, 0)

    def test_values_are_keyed_by_exact_type(self) -> None:
        graphed = self.wrap(lambda *, x, value: {"x": x + 1, "value": value}, max_entries=64)
        with torch.no_grad():
            # Rows of calls that differ in one leaf and are not repeated would be stopped: each comes twice at once.
            for value in VALUES:
                for seed in range(2):
                    result = graphed(x=self.x(seed=seed), value=value)
                    assert_same(result["x"], self.x(seed=seed) + 1)
                    assert type(result["value"]) is type(value)
                    assert repr(result["value"]) == repr(value)
        assert graphed.captures == len(VALUES)
        assert graphed.stats()["replays"] == len(VALUES)

    def test_trees_of_kwargs(self) -> None:
        twin = self.twin(lambda *, tree: (tree["r"].hidden + tree["p"].first, tree))
        with torch.no_grad():
            for seed, rest in enumerate((None, None, self.x(), self.x(seed=9), [self.x()])):
                x = self.x(seed=seed)
                record = zoo.Record(x, 3, rest)
                twin(tree={"r": record, "p": zoo.Pair(x + 1, None), "o": OrderedDict(b=x * 2, a="t"), 3: (x * 3,)})
        assert twin.counts() == (3, 2, 0)

    def test_dict_order(self) -> None:
        twin = self.twin(lambda *, x, extra: [*extra.values(), x * 2 - next(iter(extra.values()))])
        x, a, b = self.x(), self.x(seed=1), self.x(seed=2)
        with torch.no_grad():
            for _ in range(3):
                forth = twin(x=x, extra={"a": a, "b": b})
                back = twin(x=x, extra={"b": b, "a": a})
                twin(extra={"b": b, "a": a}, x=x)
        assert not torch.equal(forth[0], back[0])
        assert twin.graphed.stats()["eager_calls"] == 0
        assert twin.graphed.stats()["replays"] >= 5

    def test_sharing_is_keyed(self) -> None:
        def forward(*, a: Tensor, b: Tensor) -> Tensor:
            a.add_(1)
            return b * 2

        twin = self.twin(forward)
        with torch.no_grad():
            for seed in range(3):
                x = self.x(4, seed)
                twin(a=x, b=x)
                twin(a=self.x(4, seed), b=self.x(4, seed))
                base = self.x(8, seed)
                twin(a=base[:4], b=base[4:])
                twin(a=base[:4], b=base[2:6])
                twin(a=base[2:6], b=base[:4])
        assert twin.counts() == (5, 10, 0)

    def test_sharing_of_other_dtypes_and_strides(self) -> None:
        def forward(*, bytes: Tensor, x: Tensor) -> Tensor:
            bytes[..., :4] = 0
            return x + 1

        twin = self.twin(forward)
        with torch.no_grad():
            for seed in range(3):
                x = self.x(4, seed)
                twin(bytes=x.view(torch.uint8)[1:], x=x.t())
        assert twin.counts() == (1, 2, 0)

    def test_previous_output_is_an_input(self) -> None:
        twin = self.twin(lambda *, x: (x * 0.5, x.neg_()))
        x = self.x()
        with torch.no_grad():
            for _ in range(4):
                x = twin(x=x)[0]
                x = twin(x=x)[1]
        assert twin.counts() == (1, 7, 0)

    def test_parameter_is_a_plain_tensor(self) -> None:
        twin = self.twin(lambda *, x: x * 2)
        with torch.no_grad():
            twin(x=nn.Parameter(self.x()))
            twin(x=self.x(seed=1))
            assert type(twin(x=nn.Parameter(self.x(seed=2)))) is Tensor
        assert twin.counts() == (1, 2, 0)

    def test_variant_is_keyed(self) -> None:
        module = zoo.MLP().to(self.device)
        factor = [1.0]
        graphed = self.wrap(lambda *, x: module(x) * factor[0])
        with torch.no_grad():
            for seed in range(3):
                for factor[0] in (1.0, 2.0):
                    x = self.x(seed=seed)
                    assert_same(graphed(x=x, variant=("lora", factor[0], None)), module(x) * factor[0])
        assert (graphed.captures, graphed.stats()["replays"]) == (2, 4)

    def test_variant_without_a_value_is_an_error(self) -> None:
        graphed = self.wrap(zoo.MLP())
        for variant, path in ((object(), "variant"), (self.x(), "variant"), ({"a": [1, self.x()]}, 'variant["a"][1]')):
            bound = graphed.options(variant=variant)
            for use in (bound, bound.prepare, bound.evict, bound.unpin):
                with torch.no_grad(), pytest.raises(graphreplay.UnsupportedLeafError) as caught:
                    use(x=self.x())
                assert caught.value.path == path
        assert graphed.captures == 0

    def test_keep_alive_is_a_tuple(self) -> None:
        graphed = self.wrap(lambda *, x: x + 1)
        for value in (self.x(), nn.Linear(1, 1), [1], None):
            for use in (graphed, graphed.prepare, graphed.options):
                with pytest.raises(graphreplay.ConfigurationError, match="keep_alive must be a tuple"):
                    use(keep_alive=value)

    def test_keep_alive_lives_as_long_as_the_graph(self) -> None:
        class Plan:
            pass

        plan = Plan()
        alive = weakref.ref(plan)
        graphed = self.wrap(lambda *, x: x + 1)
        with torch.no_grad():
            graphed(x=self.x(), keep_alive=(plan,))
            del plan
            assert alive() is not None
            graphed(x=self.x())
        assert graphed.evict(x=self.x()) is False, "grad mode is another key"
        with torch.no_grad():
            assert graphed.evict(x=self.x()) is True
        assert alive() is None
