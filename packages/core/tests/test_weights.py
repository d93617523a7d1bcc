"""The watch over a module tree: what counts as a change, and what the watch keeps alive or puts back."""

import functools
import weakref
from collections import deque

import pytest
import torch
from torch import nn

from graphreplay.attributes import AttributeSnapshot, StatefulForwardError, attributes_kept
from graphreplay.weights import ModuleWatch, modules_behind


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.list = [1]
        self.dict = {"a": 1}
        self.number = 1

    def forward(self, x):
        return self.inner(x)


def test_no_change():
    model = Model()
    watch = ModuleWatch(model)
    model(torch.ones(3, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.load_state_dict(model.state_dict())
    model.to("cpu")
    model.number = 2  # plain attributes are the caller's to name, by variant=
    assert watch.changed() is None
    assert ModuleWatch(None).changed() is None


def test_changes_of_hooks_that_leave_their_number_alone():
    model = Model()
    handle = model.inner.register_forward_hook(lambda *_: None)
    watch = ModuleWatch(model)
    handle.remove()
    model.inner.register_forward_hook(lambda *_: None)
    assert "hooks" in (watch.changed() or "")


def test_global_hooks_are_a_change():
    watch = ModuleWatch(Model())
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "hooks" in (watch.changed() or "")
    finally:
        handle.remove()
    assert watch.changed() is None


def test_added_tensors_are_watched_and_named():
    tensor = torch.ones(2)
    watch = ModuleWatch(None)
    watch.add("of a closure", tensor)
    assert watch.changed() is None
    tensor.data = torch.ones(2)
    assert "of a closure" in (watch.changed() or "")


def test_moved_weight_is_named_by_its_path():
    model = Model()
    watch = ModuleWatch(model)
    model.inner[0].bias.data = torch.ones(2)
    assert "inner.0.bias" in (watch.changed() or "")


@pytest.mark.parametrize("change", ["strides", "shape", "offset"])
def test_weight_seen_otherwise_in_the_same_memory(change):
    model = nn.ParameterDict({"w": nn.Parameter(torch.arange(16.0).view(4, 4))})
    watch = ModuleWatch(model)
    data = model["w"].data
    model["w"].data = {"strides": data.t(), "shape": data.view(2, 8), "offset": data[1:]}[change]
    assert watch.changed() is not None


def test_memory_of_replaced_weights_lives_as_long_as_the_watch():
    model = Model()
    watch = ModuleWatch(model)
    old = weakref.ref(model.inner[0].weight)
    address = model.inner[0].weight.data_ptr()
    model.inner[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert old() is not None
    assert address not in {torch.zeros(2, 2).data_ptr() for _ in range(50)}
    del watch
    assert old() is None


def test_odd_weights_are_refused_by_name():
    model = Model()
    model.register_buffer("odd", torch.eye(2).to_sparse())
    assert "odd" in (ModuleWatch(model).refusal or "")
    assert ModuleWatch(Model()).refusal is None


def test_requires_grad_is_read_as_it_is_now():
    model = Model().requires_grad_(False)
    watch = ModuleWatch(model)
    assert not watch.requires_grad()
    model.inner[1].weight.requires_grad_()
    assert watch.requires_grad()


MUTATIONS = {
    "number": lambda m: setattr(m, "number", 2),
    "new": lambda m: setattr(m, "new", 3),
    "gone": lambda m: delattr(m, "number"),
    "deep": lambda m: setattr(m.inner[0], "cache", torch.ones(2)),
    "list": lambda m: m.list.append(2),
    "dict": lambda m: m.dict.update(a=2),
    "buffer": lambda m: setattr(m.inner[1], "running_mean", torch.ones(2)),
    "weight": lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "submodule": lambda m: setattr(m, "inner", nn.Identity()),
    "empty_list": lambda m: m.empty.append(1),
    "set": lambda m: m.seen.add(1),
    "deque": lambda m: m.queue.append(1),
}


def state_of(model):
    return {
        name: {key: (id(value), repr(value)) for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("name", MUTATIONS)
def test_attribute_changes_are_refused_and_undone(name):
    model = Model()
    model.empty, model.seen, model.queue = [], {0}, deque([0])
    before = state_of(model)
    with (
        pytest.raises(StatefulForwardError, match="attribute"),
        attributes_kept(AttributeSnapshot(list(model.named_modules()))),
    ):
        MUTATIONS[name](model)
    assert state_of(model) == before


def test_attributes_set_to_what_they_were_are_no_change():
    model = Model()
    model.length, model.shape = 1000, torch.Size([1000])
    with attributes_kept(AttributeSnapshot(list(model.named_modules()))):
        model.length, model.shape = int("1000"), torch.zeros(1000).shape
        model.list = model.list


def test_attributes_are_put_back_when_the_body_raises():
    model = Model()
    before = state_of(model)

    def fail():
        model.number = 5
        model.list.append(3)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), attributes_kept(AttributeSnapshot(list(model.named_modules()))):
        fail()
    assert state_of(model) == before


def test_modules_behind_a_forward():
    model, other = Model(), Model()
    default = {"m": other}
    assert modules_behind(model) == [model]
    assert modules_behind(model.forward) == [model]
    assert modules_behind(functools.partial(model, x=1)) == [model]
    assert modules_behind(functools.partial(functools.partial(model.forward), other)) == [model, other]
    assert modules_behind(lambda x: model(x) + default["m"](x)) == [model]
    assert modules_behind(lambda x, m=other: m(x)) == [other]
    assert modules_behind([].append) == []
