"""The watch over a module tree: what counts as a change, and what the watch keeps alive or puts back."""

import functools
import types
import weakref
from collections import OrderedDict, deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from graphreplay import ReferenceGraphedForward, looks
from graphreplay.attributes import AttributeSnapshot, StatefulForwardError, attributes_kept
from graphreplay.behind import modules_behind
from graphreplay.looks import dict_version
from graphreplay.weights import ModuleWatch


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


def test_names_that_trade_places_are_a_change():
    model = Model()
    model.scale, model.shift = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    watch = ModuleWatch(model)
    scale, shift = model.scale, model.shift
    del model.scale, model.shift
    model.shift, model.scale = scale, shift  # the same tensors in the same order
    assert "weights" in (watch.changed() or "")
    model = nn.Sequential(OrderedDict(first=nn.Tanh(), second=nn.ReLU()))
    watch = ModuleWatch(model)
    first, second = model.first, model.second
    del model.first, model.second
    model.second, model.first = first, second
    assert "submodules" in (watch.changed() or "")


def test_submodules_that_move_in_their_ordered_dict_are_a_change():
    model = Model()
    model.inner._modules = OrderedDict(model.inner._modules)
    watch = ModuleWatch(model)
    assert [watch.changed() for _ in range(2)] == [None, None]  # the second look is the quick one
    model.inner._modules.move_to_end("0")
    assert "submodules" in (watch.changed() or "")


@pytest.mark.parametrize("name", ["number", "inner"])
def test_a_tensor_among_the_attributes_that_was_none_is_a_change(name):
    model = Model()
    watch = ModuleWatch(model)
    assert [watch.changed() for _ in range(2)] == [None, None]
    model.__dict__[name] = torch.ones(2)  # what is there hides a submodule of the same name
    assert "attributes" in (watch.changed() or "")


def test_a_weight_that_is_conjugated_in_place_is_a_change():
    model = Model()
    model.scale = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    watch = ModuleWatch(model)
    assert [watch.changed() for _ in range(2)] == [None, None]
    model.scale.data = model.scale.data.conj()
    assert "scale" in (watch.changed() or "")


def test_a_hook_that_moves_to_the_next_module_is_a_change():
    def moving(*_):
        return None

    model = Model()
    model.inner[0].register_forward_hook(print)
    handle = model.inner[0].register_forward_hook(moving)
    model.inner[1].register_forward_hook(print)
    watch = ModuleWatch(model)
    handle.remove()
    model.inner[1].register_forward_hook(moving, prepend=True)  # the same hooks in the same order
    assert "hooks" in (watch.changed() or "")


def test_a_hook_that_is_called_with_kwargs_from_now_on_is_a_change():
    model = Model()
    handle = model.register_forward_hook(print)
    watch = ModuleWatch(model)
    handle.remove()
    handle = model.register_forward_hook(print)
    assert watch.changed() is None
    handle.remove()
    model.register_forward_hook(print, with_kwargs=True)
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


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda m: m.tree["b"][1].append(2), "inner.tree.b"),
        (lambda m: m.tree["b"][0].update(c=1), "inner.tree.b"),
        (lambda m: m.tree.update(a=2), "inner.tree.a"),
        (lambda m: m.empty.update(a=1), "inner.empty.a"),
        (lambda m: setattr(m, "late", 1), "inner.late"),
    ],
)
def test_the_attribute_that_changed_is_named(change, path):
    model = Model()
    model.inner.tree, model.inner.empty = {"a": 1, "b": ({"c": 0}, [])}, OrderedDict()
    with (
        pytest.raises(StatefulForwardError, match=rf"changes attribute {path}\b"),
        attributes_kept(AttributeSnapshot(list(model.named_modules()))),
    ):
        change(model.inner)
    assert (model.inner.tree, model.inner.empty) == ({"a": 1, "b": ({"c": 0}, [])}, OrderedDict())


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


# --------------------------------------------------------------------- a look after one that found nothing


class Watched(nn.Module):
    """Something of each kind that a watch looks at."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.inner[0].weight
        self.bare = nn.Identity()  # without weights, submodules or hooks
        self.mask = torch.ones(2)  # a tensor that is no buffer
        self.nested = ReferenceGraphedForward(nn.Linear(2, 2), device="cpu")
        self.number, self.list = 1, [1]
        self.hook = self.inner.register_forward_hook(no_hook)
        self.inner.register_forward_hook(another_hook)
        self.eval()

    def forward(self, x):
        return self.bare(self.tied(self.inner(x)) * self.mask) + self.nested.module(x) * self.number


class Other(Watched):
    def forward(self, x):
        return x


def no_hook(*_):
    return None


def another_hook(*_):
    return None


def new(tensor):
    return nn.Parameter(tensor.detach() * 2)


CHANGES = {
    "parameter": lambda m: setattr(m.inner[0], "weight", new(m.inner[0].weight)),
    "parameter in its dict": lambda m: m.inner[0]._parameters.update(bias=new(m.inner[0].bias)),
    "parameter over the same memory": lambda m: setattr(m.inner[0], "bias", nn.Parameter(m.inner[0].bias.data)),
    "parameter set to None": lambda m: setattr(m.inner[0], "bias", None),
    "parameter deleted": lambda m: delattr(m.inner[0], "bias"),
    "first parameter": lambda m: m.bare.register_parameter("scale", nn.Parameter(torch.ones(2))),
    "buffer": lambda m: setattr(m.inner[1], "running_mean", torch.full((2,), 3.0)),
    "buffer in its dict": lambda m: m.inner[1]._buffers.update(running_var=torch.full((2,), 3.0)),
    "first buffer": lambda m: m.bare.register_buffer("scale", torch.ones(2)),
    "submodule": lambda m: setattr(m, "inner", nn.Identity()),
    "submodule in its dict": lambda m: m.inner._modules.update({"0": nn.Linear(2, 2)}),
    "submodule appended": lambda m: m.inner.append(nn.Tanh()),
    "submodule deleted": lambda m: m.inner.pop(1),
    "first submodule": lambda m: m.bare.add_module("deeper", nn.Tanh()),
    "order of submodules": lambda m: m.inner._modules.update({"0": m.inner._modules.pop("0")}),
    "first forward hook": lambda m: m.bare.register_forward_hook(no_hook),
    "forward hook": lambda m: m.inner.register_forward_hook(no_hook),
    "forward pre-hook": lambda m: m.inner.register_forward_pre_hook(no_hook),
    "backward hook": lambda m: m.inner.register_full_backward_hook(no_hook),
    "backward pre-hook": lambda m: m.inner.register_full_backward_pre_hook(no_hook),
    "order of hooks": lambda m: m.inner._forward_hooks.move_to_end(next(iter(m.inner._forward_hooks))),
    "hook removed": lambda m: m.hook.remove(),
    "hooks cleared": lambda m: m.inner._forward_hooks.clear(),
    "dict of hooks": lambda m: setattr(m.inner, "_forward_hooks", OrderedDict()),
    "dict of first hooks": lambda m: setattr(m.bare, "_forward_pre_hooks", OrderedDict({1: no_hook})),
    "dict of parameters": lambda m: setattr(m.tied, "_parameters", {k: new(v) for k, v in m.tied._parameters.items()}),
    "dict of buffers": lambda m: setattr(m.inner[1], "_buffers", dict(m.inner[1]._buffers)),
    "dict of submodules": lambda m: setattr(m, "_modules", {**m._modules, "bare": nn.Tanh()}),
    "training": lambda m: m.train(),
    "training of a submodule": lambda m: m.inner[1].train(),
    "training as an attribute": lambda m: m.bare.__dict__.update(training=True),
    "own forward": lambda m: setattr(m, "forward", lambda x: x),
    "own forward of a submodule": lambda m: setattr(m.bare, "forward", lambda x: x * 2),
    "class": lambda m: setattr(m, "__class__", Other),
    "class of a submodule": lambda m: setattr(m.bare, "__class__", nn.Tanh),
    "moved": lambda m: setattr(m.inner[0].weight, "data", m.inner[0].weight.data.clone()),
    "moved buffer": lambda m: m.inner[1].running_mean.set_(torch.ones(2).untyped_storage()),
    "transposed": lambda m: setattr(m.inner[0].weight, "data", m.inner[0].weight.data.t()),
    "transposed in place": lambda m: torch.no_grad()(m.inner[0].weight.t_)(),
    "shape": lambda m: setattr(m.tied.bias, "data", m.tied.bias.data[None]),
    "dtype": lambda m: setattr(m.tied.bias, "data", m.tied.bias.data.view(torch.int32).view(torch.float32).half()),
    "requires_grad": lambda m: m.tied.bias.requires_grad_(False),
    "requires_grad of a buffer": lambda m: m.inner[1].running_mean.requires_grad_(),
    "tied weight untied": lambda m: setattr(m.tied, "weight", nn.Parameter(m.tied.weight.data)),
    "weight tied": lambda m: setattr(m.tied, "bias", m.inner[0].bias),
    "tensor among the attributes": lambda m: setattr(m, "mask", torch.ones(2)),
    "tensor among the attributes deleted": lambda m: delattr(m, "mask"),
    "graphed forward among the attributes": lambda m: setattr(m, "nested", m.nested.module),
    "weight behind a graphed forward": lambda m: setattr(m.nested.module, "bias", new(m.nested.module.bias)),
    "moved behind a graphed forward": lambda m: setattr(m.nested.module.weight, "data", torch.ones(2, 2)),
}
IRRELEVANT = {
    "number": lambda m: setattr(m, "number", 2),
    "new attribute": lambda m: setattr(m, "name", "a"),
    "attribute deleted": lambda m: delattr(m, "number"),
    "attribute of a submodule": lambda m: setattr(m.inner[0], "note", object()),
    "list": lambda m: m.list.append(2),
    "weight set to itself": lambda m: setattr(m.inner[0], "weight", m.inner[0].weight),
    "training set to itself": lambda m: m.eval(),
    "hook added and removed": lambda m: m.inner.register_forward_hook(no_hook).remove(),
    "updated in place": lambda m: m.inner[0].weight.data.mul_(2),
    "gradients": lambda m: m(torch.ones(3, 2)).sum().backward(),
    "load_state_dict": lambda m: m.load_state_dict(m.state_dict()),
    "moved to where it is": lambda m: m.to("cpu"),
}


def watched(forward):
    """A watch whose next look will be a quick one."""
    watch = ModuleWatch(forward)
    assert not watch.is_untouched()
    assert watch.changed() is None
    assert watch.is_untouched()
    assert watch.changed() is None
    return watch


def in_closure(model):
    return lambda *, x: model(x)


@pytest.mark.parametrize("behind", [lambda m: m, lambda m: m.forward, in_closure], ids=["module", "method", "closure"])
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_noticed_after_a_quick_look(change, behind):
    model = Watched()
    watch = watched(behind(model))
    CHANGES[change](model)
    assert not watch.is_untouched()
    assert watch.changed() is not None


@pytest.mark.parametrize("change", IRRELEVANT)
def test_what_does_not_matter_is_no_change_and_the_next_look_is_quick_again(change):
    model = Watched()
    watch = watched(model)
    IRRELEVANT[change](model)
    assert watch.changed() is None
    assert watch.is_untouched()


@pytest.mark.parametrize("change", IRRELEVANT)
@pytest.mark.parametrize("check", [True, False])
def test_what_does_not_matter_drops_no_graphs(change, check):
    model = Watched().eval()
    graphed = ReferenceGraphedForward(model, device="cpu", check_module=check)
    for _ in range(3):
        with torch.no_grad():
            graphed(x=torch.ones(3, 2))
    IRRELEVANT[change](model)
    with torch.no_grad():
        graphed(x=torch.ones(3, 2))
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 3)


def test_another_module_in_the_closure_is_noticed_after_a_quick_look():
    model, other = Model(), Model()
    watch = watched(lambda *, x: model(x))
    model = other
    assert "weights or submodules" in (watch.changed() or "")


def test_the_module_of_a_graphed_forward_is_noticed_after_a_quick_look():
    graphed = ReferenceGraphedForward(Model(), device="cpu")
    watch = watched(graphed)
    graphed.module = Model()
    assert "weights or submodules" in (watch.changed() or "")


def test_a_global_hook_is_noticed_after_a_quick_look():
    watch = watched(Model())
    handle = torch.nn.modules.module.register_module_forward_pre_hook(no_hook)
    try:
        assert "hooks" in (watch.changed() or "")
    finally:
        handle.remove()
    assert watch.changed() is None


def test_a_tensor_added_after_a_quick_look_is_watched():
    watch, tensor = watched(Model()), torch.ones(2)
    watch.add("of a closure", tensor)
    assert watch.changed() is None
    assert watch.is_untouched()
    tensor.data = torch.ones(2)
    assert "of a closure" in (watch.changed() or "")


def test_a_quick_look_in_another_mode_of_the_thread_is_no_change():
    watch = watched(Model())
    for mode in (torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu")):
        for _ in range(2):
            with mode():
                assert watch.changed() is None
            assert watch.changed() is None


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(3, 2))])
def test_torchscript_modules_are_always_looked_at_closely(make):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    scripted = make(model)
    watch = ModuleWatch(scripted)
    for _ in range(3):
        assert watch.changed() is None
        assert not watch.is_untouched()
    dict(scripted.named_parameters())["0.bias"].data = torch.ones(2)
    assert "0.bias" in (watch.changed() or "")
    watch = ModuleWatch(scripted)
    assert watch.changed() is None
    scripted.train()
    assert "training" in (watch.changed() or "")


def test_lazy_modules_are_looked_at_closely_until_they_are_initialized():
    model = nn.Sequential(nn.LazyLinear(2))
    watch = ModuleWatch(model)
    for _ in range(3):
        assert watch.changed() is None
        assert not watch.is_untouched()
    model(torch.ones(3, 2))
    assert "was initialized" in (watch.changed() or "")
    watched(model)


def test_modules_without_tensors_are_looked_at_closely():
    model = nn.Sequential(nn.ReLU())
    watch = ModuleWatch(model)
    for _ in range(3):
        assert watch.changed() is None
    model.append(nn.Tanh())
    assert watch.changed() is not None


STEPS = {
    name: change
    for name, change in (CHANGES | IRRELEVANT).items()
    if name
    not in (
        "parameter deleted",
        "parameter set to None",
        "buffer in its dict",
        "tensor among the attributes deleted",
        "attribute deleted",
        "submodule",
        "submodule deleted",
        "order of submodules",
        "order of hooks",
        "class",
        "dtype",
        "shape",
        "first parameter",
        "first buffer",
        "first submodule",
        "graphed forward among the attributes",
        "backward hook",
        "backward pre-hook",
        "gradients",
        "own forward",
        "moved behind a graphed forward",
        "requires_grad of a buffer",
    )
}
"""Those that may follow each other in any order, any number of times."""


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 3)), max_size=6), st.booleans())
def test_calls_between_changes_are_as_eager(steps, lent):
    model = Watched()
    with torch.no_grad():
        model.inner[0].weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        graphed = ReferenceGraphedForward(model, device="cpu", clone_outputs=not lent)
        for turn, (step, calls) in enumerate([("number", 3), *steps]):
            if step != "number":  # which a wrapper does not see
                STEPS[step](model)
            for call in range(calls):
                x = torch.full((3, 2), 1.0 + turn + call)
                assert torch.equal(graphed(x=x), model(x)), f"{step}, call {call}"
    assert graphed.enabled


@pytest.mark.parametrize("cls", [dict, OrderedDict])
def test_each_change_of_a_dict_gives_it_a_version_that_none_had(cls):
    """As torch's guards have it, by a name that is not public: the quick look rests on it."""
    one, other = cls(a=1), cls(a=1)
    seen = [dict_version(one), dict_version(other)]
    for change in (
        lambda: one.update(b=2),
        lambda: one.update(a=3),
        lambda: one.pop("b"),
        lambda: one.setdefault("c", 4),
        lambda: other.update(a=5),
        one.clear,
    ):
        change()
        seen += [dict_version(one), dict_version(other)]
        assert dict_version(one) == seen[-2], "looking changes nothing"
    assert len(set(seen)) == 2 + 6


class HoldsTensors(nn.Module):
    """Reads tensors from containers among its attributes."""

    def __init__(self):
        super().__init__()
        self.listed, self.named, self.paired = [torch.ones(3)], {"a": torch.ones(3)}, (torch.ones(3), 1)
        self.deep = {"list": [{"t": torch.ones(3)}]}
        self.plain = types.SimpleNamespace(t=torch.ones(3))

    def forward(self, *, x):
        deep = self.deep["list"][0]["t"]
        return x * self.listed[0] + self.named["a"] * self.paired[0] + deep * self.plain.t


REBOUND = {
    "an item of a list": lambda m: m.listed.__setitem__(0, torch.full((3,), 2.0)),
    "a list": lambda m: setattr(m, "listed", [torch.full((3,), 2.0)]),
    "an item put before": lambda m: m.listed.insert(0, torch.full((3,), 2.0)),
    "an item of a dict": lambda m: m.named.update(a=torch.full((3,), 2.0)),
    "a dict": lambda m: setattr(m, "named", {"a": torch.full((3,), 2.0)}),
    "a tuple": lambda m: setattr(m, "paired", (torch.full((3,), 2.0), 1)),
    "deep inside": lambda m: m.deep["list"][0].update(t=torch.full((3,), 2.0)),
    "on the way inside": lambda m: m.deep.update(list=[{"t": torch.full((3,), 2.0)}]),
    "an attribute of an object": lambda m: setattr(m.plain, "t", torch.full((3,), 2.0)),
    "an object": lambda m: setattr(m, "plain", types.SimpleNamespace(t=torch.full((3,), 2.0))),
}


@pytest.mark.parametrize("what", REBOUND)
@torch.no_grad()
def test_tensors_that_containers_of_the_module_hold_are_noticed_when_bound_anew(what):
    module = HoldsTensors()
    graphed = ReferenceGraphedForward(module, device="cpu")
    for turn in range(3):
        x = torch.full((3,), float(turn))
        assert torch.equal(graphed(x=x), module(x=x))
    assert graphed.stats()["replays"] == 2
    REBOUND[what](module)
    for turn in range(3):
        x = torch.full((3,), turn + 0.5)
        assert torch.equal(graphed(x=x), module(x=x))
    assert (graphed.captures, graphed.stats()["replays"]) == (2, 4)


@torch.no_grad()
def test_what_else_containers_of_the_module_hold_drops_no_graph():
    module = HoldsTensors()
    graphed = ReferenceGraphedForward(module, device="cpu")
    for turn in range(3):
        module.named[turn] = torch.zeros(2)
        module.listed.append(torch.zeros(2))
        module.deep["list"].append(turn)
        module.step = turn
        graphed(x=torch.full((3,), float(turn)))
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 2)


def test_sets_are_compared_without_their_order():
    module = nn.Linear(2, 2)
    module.names = {0, 8}
    before = AttributeSnapshot([("m", module)])
    module.names.clear()
    module.names.update([8, 0])
    assert list(module.names) != list({0, 8}), "this is about sets in another order"
    assert (before.touched(), before.changed()) == ([], None)
    module.names.remove(8)
    assert before.changed() == "m.names"
    before.restore()
    assert module.names == {0, 8}
    module.names.add(8.0)  # equal to what is there, so that nothing is added
    assert before.changed() is None


def test_a_nested_buffer_cannot_be_watched():
    model = Model()
    model.register_buffer("rows", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    assert ModuleWatch(model).refusal == "weight rows is a Tensor that is nested, whose memory cannot be watched"


def test_a_python_whose_dicts_do_not_tell_of_attributes_is_refused(monkeypatch):
    looks.require_versions()
    monkeypatch.setattr(looks, "dict_version", lambda held: len(held))  # as Python 3.13.0, but for new attributes
    with pytest.raises(ImportError, match=r"when the attributes of a module change; take Python 3\.13\.1 or later"):
        looks.require_versions()
