"""The compiled part, and the Python that does the same where it is missing. No GPU is needed for it."""

import ctypes
import gc
import shutil
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections import OrderedDict
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from graphreplay import ReferenceGraphedForward, looks
from graphreplay.storage import is_freed
from graphreplay.testing.contract import (
    AmbientContract,
    HiddenContract,
    KeyContract,
    LifeContract,
    RefusalContract,
    StateContract,
    TurnsContract,
)
from graphreplay_cuda import copynode, driver, kernels, native
from graphreplay_cuda.copynode import HandOut, Table

compiled = pytest.mark.skipif(native.missing is not None, reason=f"no compiled part: {native.missing}")
WAYS = ["python", pytest.param("compiled", marks=compiled)]
"""Both are to give the same answers."""


# ------------------------------------------------------------------------------------------- addresses


def moved():
    tensor = torch.zeros(3)
    tensor.data = torch.ones(5)
    return tensor


def met_again():
    """A tensor whose Python object was kept by C++ in between."""
    weight = nn.Parameter(torch.ones(3))
    (weight * 2).sum().backward()
    address = weight.grad.data_ptr()
    gc.collect()
    assert weight.grad.data_ptr() == address
    return weight.grad


def freed(offset=0):
    tensor = torch.zeros(3 + offset)[offset:]
    tensor.untyped_storage().resize_(0)
    return tensor


TENSORS = {
    "a tensor": lambda: torch.zeros(3),
    "a view": lambda: torch.zeros(8)[3:],
    "strided": lambda: torch.zeros(4, 4).t()[1:],
    "a parameter": lambda: nn.Parameter(torch.zeros(3)),
    "a buffer": lambda: nn.Buffer(torch.zeros(3)),
    "no elements": lambda: torch.zeros(0),
    "a scalar": lambda: torch.tensor(1),
    "freed": freed,
    "a view that was freed": lambda: freed(2),
    "moved": moved,
    "met again": met_again,
    "of numpy": lambda: torch.from_numpy(torch.arange(6).numpy()),
    "conjugated": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "without memory": lambda: torch.zeros(3, device="meta"),
    "of inference mode": lambda: torch.inference_mode()(torch.zeros)(3),
    "with history": lambda: nn.Parameter(torch.zeros(3)) * 2,
}


@compiled
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_addresses_are_those_of_torch(make):
    tensor = make()
    assert native._native.address(tensor) == (0 if is_freed(tensor) else tensor.data_ptr())


@compiled
@pytest.mark.parametrize("other", [None, 3, "x", object(), [torch.zeros(1)], torch.Tensor])
def test_what_is_no_tensor_has_none(other):
    with pytest.raises(TypeError, match="not a tensor"):
        native._native.address(other)


@compiled
def test_a_tensor_without_one_address_is_refused():
    with pytest.raises(RuntimeError, match="no address"):
        native._native.address(torch.zeros(3).to_sparse())


# ----------------------------------------------------------------------------------------------- looks


class Subclass(torch.Tensor):
    pass


def of(*shape, **options):
    return torch.zeros(shape or (2, 3), **options)


OTHERS = {
    "shape": lambda: of(3, 2),
    "one more dimension": lambda: of(1, 2, 3),
    "fewer dimensions": lambda: of(6),
    "strides": lambda: of(3, 2).t(),
    "expanded": lambda: of(2, 1).expand(2, 3),
    "dtype": lambda: of(dtype=torch.bfloat16),
    "a dtype of the same size": lambda: of(dtype=torch.int32),
    "device": lambda: of(device="meta"),
    "a parameter": lambda: nn.Parameter(of(), requires_grad=False),
    "a subclass": lambda: of().as_subclass(Subclass),
    "negated": lambda: torch._neg_view(of()),
    "made under inference mode": lambda: torch.inference_mode()(of)(),
    "sparse": lambda: of().to_sparse(),
    "mkldnn": lambda: of().to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([of(3), of(3)]),
    "quantized": lambda: torch.quantize_per_tensor(of(), 0.1, 0, torch.qint8),
    "no tensor": lambda: 3,
    "nothing": lambda: None,
    "a type": lambda: torch.Tensor,
}


def looks_of(way, tensors):
    return (looks.looks_of if way == "python" else native.looks_of)(tensors)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("position", [0, 1])
def test_tensors_that_look_otherwise(way, other, position):
    alike = looks_of(way, [of(), of()])
    assert alike(of(), of())
    assert alike(torch.ones(2, 3)[:], of(4, 3)[1:3])
    given = [of(), of()]
    given[position] = OTHERS[other]()
    if other == "nested" and way == "python":
        pytest.skip("torch's own check ends the process")
    assert not alike(*given)


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
def test_devices_of_one_type(way):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    alike = looks_of(way, [of(device="cuda:0")])
    assert alike(of(device="cuda:0"))
    assert not alike(of(device="cuda:1"))


@pytest.mark.parametrize("way", WAYS)
def test_how_many_tensors_and_which(way):
    a, b = of(), of()
    alike = looks_of(way, [a, b])
    assert alike(b, a)
    assert not alike(a, a)
    if way == "compiled":  # torch's own check takes their number for granted
        for given in ([], [a], [a, b, of()]):
            assert not alike(*given)
    many = [of(1) for _ in range(200)]
    alike = looks_of(way, many)
    assert alike(*reversed(many))
    assert not alike(*many[:-1], many[3])


@pytest.mark.parametrize("way", WAYS)
def test_complex_tensors_and_scalars(way):
    z = torch.zeros(3, dtype=torch.complex64)
    assert looks_of(way, [z])(z.clone())
    assert not looks_of(way, [z])(z.conj())
    assert looks_of(way, [z.conj()])(z.clone().conj())
    assert looks_of(way, [torch.tensor(1.0)])(torch.tensor(2.0))
    assert not looks_of(way, [torch.tensor(1.0)])(torch.zeros(1))
    assert looks_of(way, [of(0, 3)])(of(0, 3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("devices", [["cpu"], ["meta", "cpu"]])
def test_modes_of_the_thread(way, devices):
    tensors = [of(device=device) for device in devices]
    alike = looks_of(way, tensors)
    with torch.autocast("cpu"):
        assert not alike(*tensors)
        assert looks_of(way, tensors)(*tensors)
    answers = []
    torch.vmap(lambda x: answers.append(alike(*tensors)) or x)(of())
    assert answers == [False]
    assert alike(*tensors)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", ["mkldnn", "made under inference mode"])
def test_modes_that_show_in_the_second_tensor_alone(way, first):
    tensors = [OTHERS[first](), of()]
    alike = looks_of(way, tensors)
    assert alike(*tensors)
    with torch.autocast("cpu"):
        assert not alike(*tensors)
    with torch._C._AutoDispatchBelowAutograd():
        assert not alike(*tensors)
    assert alike(*tensors)


class Lying(torch.Tensor):
    """Says of itself that it has a million dimensions."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3), dispatch_sizes_strides_policy="sizes")

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        answers = {"dim": 1_000_000, "sym_size": [2, 3], "size": [2, 3], "sym_stride": [3, 1], "stride": [3, 1]}
        return answers[op.overloadpacket.__name__]


@compiled
def test_subclasses_are_left_to_torch():
    assert type(native.looks_of([of()]).__self__) is native._native.Looks
    assert type(native.looks_of([Lying()]).__self__) is not native._native.Looks
    assert native.sight_of([torch.Tensor._make_subclass(Subclass, of())], [], [], [])()


@pytest.mark.parametrize("way", WAYS)
def test_looks_keep_no_tensor(way):
    tensor = of()
    alive, alike = weakref.ref(tensor), looks_of(way, [tensor])
    del tensor
    gc.collect()
    assert alive() is None
    assert alike(of())


@compiled
@pytest.mark.parametrize(("tensors", "firsts"), [((3,), ()), ((of(),), (1,)), ((of(),), (-1,)), ((of(),), ("x",))])
def test_what_no_looks_are_made_of(tensors, firsts):
    with pytest.raises((TypeError, IndexError)):
        native._native.Looks(tensors, firsts, None)


@compiled
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_sizes_have_no_looks():
    with pytest.raises(RuntimeError, match="without sizes and strides"):
        native._native.Looks((of(), OTHERS["nested"]()), (), None)


# ---------------------------------------------------------------------------------------------- sights


class Other(nn.Linear):
    pass


class Sighted:
    """What a sight is made of."""

    def __init__(self):
        self.layer = nn.Linear(2, 3)
        self.view = torch.zeros(8)[3:]
        self.tensors = [self.layer.weight, self.layer.bias, torch.zeros(4), self.view]
        self.dicts = [self.layer.__dict__, self.layer._parameters, {"a": 1}, OrderedDict(b=2)]
        self.empty = [{}, OrderedDict(), self.layer._buffers]
        self.objects = [self.layer, nn.ReLU()]

    def sight(self, way):
        make = looks.sight_of if way == "python" else native.sight_of
        return make(self.tensors, self.dicts, self.empty, self.objects)


def move(tensor):
    tensor.data = tensor.data.clone()


def put_back(held):
    held["a"] = held.pop("a")


CHANGES = {
    "a tensor moves": lambda s: move(s.tensors[2]),
    "a weight moves": lambda s: move(s.layer.weight),
    "a tensor is seen otherwise": lambda s: s.tensors[2].t_().resize_(2, 2),
    "a dtype": lambda s: setattr(s.tensors[2], "data", s.tensors[2].double()),
    "requires_grad": lambda s: s.layer.bias.requires_grad_(False),
    "freed": lambda s: s.tensors[2].untyped_storage().resize_(0),
    "an item is set": lambda s: s.dicts[2].update(a=2),
    "an item is added": lambda s: s.dicts[2].setdefault("b", 1),
    "an item goes": lambda s: s.dicts[2].pop("a"),
    "an item goes and is back": lambda s: put_back(s.dicts[2]),
    "a dict is emptied": lambda s: s.dicts[2].clear(),
    "an item of an ordered dict": lambda s: s.dicts[3].update(b=3),
    "an ordered dict is emptied": lambda s: s.dicts[3].popitem(),
    "an attribute is bound": lambda s: setattr(s.layer, "in_features", 5),
    "an attribute is new": lambda s: setattr(s.layer, "new", 5),
    "an attribute is deleted": lambda s: delattr(s.layer, "out_features"),
    "training": lambda s: s.layer.eval(),
    "another weight": lambda s: setattr(s.layer, "weight", nn.Parameter(torch.zeros(3, 2))),
    "an empty one gets an item": lambda s: s.empty[0].update(a=1),
    "an empty ordered one": lambda s: s.empty[1].update(a=1),
    "a buffer": lambda s: s.layer.register_buffer("b", torch.zeros(1)),
    "freed behind an offset": lambda s: s.view.untyped_storage().resize_(0),
    "a class": lambda s: setattr(s.layer, "__class__", Other),
}

IRRELEVANT = {
    "nothing": lambda s: None,
    "in place": lambda s: s.layer.weight.data.add_(1),
    "another dict": lambda s: {"a": 1}.update(a=2),
    "another module": lambda s: nn.Linear(2, 2).eval(),
    "the same object again": lambda s: s.dicts[2].update(a=s.dicts[2]["a"]),
    "a copy of a dict": lambda s: s.dicts[2].copy().update(a=5),
    "a gradient": lambda s: s.layer(torch.ones(2)).sum().backward(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_sight_tells_each_change(way, change):
    seen = Sighted()
    lasts = seen.sight(way)
    assert lasts()
    assert lasts()
    CHANGES[change](seen)
    left_out = change == "requires_grad" and way == "compiled"
    assert lasts() is left_out
    assert lasts() is left_out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", IRRELEVANT)
def test_what_does_not_matter_is_no_change(way, change):
    seen = Sighted()
    lasts = seen.sight(way)
    IRRELEVANT[change](seen)
    assert lasts()


@pytest.mark.parametrize("way", WAYS)
def test_a_sight_of_nothing_lasts(way):
    make = looks.sight_of if way == "python" else native.sight_of
    assert make([torch.zeros(1)], [], [], [])()


@pytest.mark.parametrize("way", WAYS)
def test_a_dict_that_was_to_be_empty_is_not(way):
    seen = Sighted()
    seen.empty[0]["a"] = 1
    assert not seen.sight(way)()


@pytest.mark.parametrize("way", WAYS)
def test_a_class_with_the_address_of_another(way):
    seen, first = Sighted(), type("First", (nn.ReLU,), {})
    seen.objects[1].__class__ = first
    lasts = seen.sight(way)
    assert lasts()
    seen.objects[1].__class__ = nn.ReLU
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is not None, "the sight keeps it, so that no other class gets its address"
    assert not lasts()
    del lasts
    gc.collect()
    assert alive() is None


@compiled
def test_answers_count_no_references():
    """Of True and False, which no one frees: built for Python 3.11, they would count all the same on 3.12."""
    seen = Sighted()
    lasts, outside = seen.sight("compiled"), Sighted()
    changed = outside.sight("compiled")
    outside.dicts[2]["a"] = 2
    things = (True, False, None, seen.tensors[0], seen.dicts[0], nn.Linear)
    gc.collect()
    gc.disable()  # what other tests left may hold some of them
    try:
        before = list(map(sys.getrefcount, things))
        for _ in range(10_000):
            lasts()
            changed()
        after = list(map(sys.getrefcount, things))
    finally:
        gc.enable()
    assert max(abs(now - was) for now, was in zip(after, before, strict=True)) < 100


@pytest.mark.parametrize("way", WAYS)
def test_sights_over_one_dict_know_nothing_of_each_other(way):
    seen = Sighted()
    first, second, third = seen.sight(way), seen.sight(way), seen.sight(way)
    del second
    gc.collect()
    seen.dicts[2]["a"] = 7
    assert not first()
    assert not third()
    assert seen.sight(way)(), "made anew, it sees what is"
    del first, third
    gc.collect()
    last = seen.sight(way)
    seen.dicts[2]["a"] = 8
    assert not last()


@pytest.mark.parametrize("way", WAYS)
def test_a_sight_that_is_part_of_what_it_sees_can_be_collected(way):
    seen = Sighted()
    seen.layer.sight = seen.sight(way)
    gone = weakref.ref(seen.layer)
    del seen
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("way", WAYS)
def test_a_sight_keeps_what_it_sees(way):
    seen = Sighted()
    alive, lasts = weakref.ref(seen.layer), seen.sight(way)
    del seen
    gc.collect()
    assert alive() is not None
    assert lasts()
    alive().eval()
    assert not lasts()


@pytest.mark.parametrize("way", WAYS)
def test_sights_of_several_threads(way):
    """Each tells of its own dicts, while others come and go."""
    wrong = []

    def work():
        for turn in range(200):
            seen = Sighted()
            lasts = seen.sight(way)
            if not lasts():
                wrong.append("changed though nothing was")
            seen.dicts[turn % 4]["in_features"] = turn + 1000
            if lasts():
                wrong.append("not changed")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@compiled
@pytest.mark.parametrize(
    "bad",
    [
        lambda check: (check, (3,), (), ()),
        lambda check: (check, (), ([],), ()),
        lambda check: (check, [], (), ()),
        lambda check: (check, (), (), [1]),
        lambda check: (check, ()),
    ],
)
def test_what_no_sight_is_made_of(bad):
    with pytest.raises(TypeError):
        native._native.Sight(*bad(lambda: True))


@compiled
def test_an_error_of_the_check_is_raised():
    def fails(*tensors):
        raise KeyError(len(tensors))

    sight = native._native.Sight(fails, (torch.zeros(1),), (), ())
    with pytest.raises(KeyError, match="1"):
        sight.lasts()


class Compiled(ReferenceGraphedForward):
    looks_of = staticmethod(native.looks_of)
    sight_of = staticmethod(native.sight_of)


@compiled
class TestCompiled(
    AmbientContract, KeyContract, RefusalContract, StateContract, HiddenContract, LifeContract, TurnsContract
):
    """The contract where it is about what a call or a module is like, on the CPU, with the compiled part."""

    cls = Compiled
    device = "cpu"


# ---------------------------------------------------------------------------------------------- loader


class Bindings:
    """The bindings, but for one function: the collector may free graphs of other tests meanwhile."""

    def __init__(self, real, set_params):
        self._real = real
        self.cuGraphExecKernelNodeSetParams = set_params

    def __getattr__(self, name):
        return getattr(self._real, name)


class Driver:
    """Notes what the table says at each call that sets the parameters of the stage kernel."""

    def __init__(self, monkeypatch, way):
        self.seen, self.status = [], 0
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._held = function(lambda *handles: self.set_params(*handles)[0])
        monkeypatch.setattr(native, "missing", "tested without" if way == "python" else None)
        monkeypatch.setattr(kernels, "stage", lambda index, capacity, outputs: None)
        monkeypatch.setattr(kernels, "hand_out", lambda index, capacity: None)
        monkeypatch.setattr(driver, "kernel_params", lambda *args: SimpleNamespace(getPtr=lambda: 33))
        monkeypatch.setattr(driver, "address", lambda name: ctypes.cast(self._held, ctypes.c_void_p).value)
        bindings = Bindings(driver.bindings(), lambda *args: self.set_params(*args[:2], args[2].getPtr()))
        monkeypatch.setattr(driver, "bindings", lambda: bindings)

    def set_params(self, executable, node, params):
        assert (executable, node, params) == (11, 22, 33)
        self.seen.append(self.table._words[:])
        return (self.status,)

    def loader(self, like, outputs):
        noted = torch.zeros(64, dtype=torch.int64)
        self.table = Table(0, like, HandOut(0, outputs, noted) if outputs else None)
        return copynode.loader(11, 22, self.table)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inputs", [0, 1, 4, 5, 128])
@pytest.mark.parametrize("outputs", [0, 1, 5, 64])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_loaded_table_has_the_addresses(monkeypatch, way, inputs, outputs, kind):
    device = Driver(monkeypatch, way)
    room = next(n for n in kernels.CAPACITIES if n >= inputs)
    places = next(n for n in kernels.OUTPUT_CAPACITIES if n >= outputs)
    load = device.loader([torch.zeros(2) for _ in range(inputs)], [torch.zeros(3) for _ in range(outputs)])
    before = device.table._words[:]
    for turn in range(3):
        given = kind(torch.zeros(2 + turn)[turn:] for _ in range(inputs))
        made = kind(torch.zeros(3) for _ in range(outputs)) if turn != 1 else ()
        assert load(given, made) == 0
        words = device.seen.pop()
        assert words[: 2 * room] == before[: 2 * room], "where inputs go, and how large they are"
        assert words[2 * room : 3 * room] == [t.data_ptr() for t in given] + [0] * (room - inputs)
        goes = [t.data_ptr() for t in made] if made else [0] * outputs
        assert words[3 * room :] == goes + [0] * (places - outputs) + before[-1:]
        assert not device.seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offset", [0, 2])
def test_freed_inputs_are_not_loaded_but_empty_ones(monkeypatch, way, offset):
    device = Driver(monkeypatch, way)
    load = device.loader([torch.zeros(3), torch.zeros(0)], [torch.zeros(3)])
    assert load([freed(offset), torch.zeros(0)], [torch.zeros(3)]) == -1
    assert not device.seen
    assert load([torch.zeros(3), torch.zeros(0)], [torch.zeros(0)]) == 0
    (words,) = device.seen
    assert words[9] == 0
    assert words[12] == 0, "an output without elements goes nowhere"


@pytest.mark.parametrize("way", WAYS)
def test_the_status_of_the_driver_is_returned(monkeypatch, way):
    device = Driver(monkeypatch, way)
    load = device.loader([torch.zeros(3)], [])
    device.status = 719
    assert load([torch.zeros(3)], ()) == 719


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("inputs", "outputs", "error"),
    [
        ([torch.zeros(3)] * 2, (), ValueError),
        ([], (), ValueError),
        ([torch.zeros(3)], [torch.zeros(3)] * 2, ValueError),
        ([None], (), TypeError),
        ([torch.zeros(3)], [None], TypeError),
    ],
)
def test_what_cannot_be_loaded(monkeypatch, way, inputs, outputs, error):
    device = Driver(monkeypatch, way)
    load = device.loader([torch.zeros(3)], [torch.zeros(3)])
    with pytest.raises(error):
        load(inputs, outputs)
    assert not device.seen


@compiled
@pytest.mark.parametrize("inputs", [torch.zeros(1, 3), {0: torch.zeros(3)}, None])
def test_what_is_no_list_or_tuple(monkeypatch, inputs):
    device = Driver(monkeypatch, "compiled")
    load = device.loader([torch.zeros(3)], [])
    with pytest.raises(TypeError, match="lists or tuples"):
        load(inputs, ())
    assert not device.seen


# --------------------------------------------------------------------------------------------- binding


@pytest.mark.skipif(shutil.which("cc") is None, reason="this machine has no C compiler")
@pytest.mark.skipif(
    sysconfig.get_config_var("Py_GIL_DISABLED") == 1, reason="this Python has no stable interface for C"
)
def test_it_is_there_where_a_compiler_is():
    assert native.missing is None


def test_without_it_everything_is_there_but_slower():
    code = """
import sys
sys.modules["graphreplay_cuda._native"] = None
from graphreplay import looks
from graphreplay_cuda import CUDAGraphedForward, native
assert native.missing.startswith("it was not built; install a C compiler"), native.missing
assert native.sight_of is CUDAGraphedForward.sight_of is looks.sight_of
assert native.looks_of is CUDAGraphedForward.looks_of is looks.looks_of
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def bound_with(monkeypatch, **others):
    """What binding says where the compiled part has these in place of its own."""
    real = native._native
    same = {"INTERFACE": real.INTERFACE, "address": real.address}
    told = dict.fromkeys(("bind", "watch", "read_versions"), lambda *args: None)
    fake = SimpleNamespace(**{**told, **same, **others})
    monkeypatch.setattr(native, "_native", fake)
    return native._bind()


@compiled
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("INTERFACE", 0, "was built for another version of this package"),
        ("address", lambda tensor: 1, "other addresses"),
    ],
)
def test_an_extension_that_is_otherwise_is_told(monkeypatch, name, value, why):
    assert bound_with(monkeypatch) is None
    monkeypatch.undo()
    assert why in bound_with(monkeypatch, **{name: value})


@compiled
@pytest.mark.parametrize("start", [object.__basicsize__, 8], ids=["tensor", "keys"])
def test_a_torch_that_is_otherwise_is_told(monkeypatch, start):
    place = native._place
    monkeypatch.setattr(native, "_place", lambda at, *args: None if at == start else place(at, *args))
    assert "torch has no place" in bound_with(monkeypatch)


@compiled
def test_where_numbers_are_found():
    held = (ctypes.c_uint64 * 4)(7, 8, 9, 8)
    at = ctypes.addressof(held)
    assert native._place(0, 32, [(at, 8)]) == 8
    assert native._place(16, 32, [(at, 8)]) == 24
    assert native._place(16, 24, [(at, 8)]) is None
    assert native._place(0, 24, [(at, 8), (at + 8, 9)]) == 8
    assert native._place(0, 24, [(at, 8), (at + 8, 7)]) is None


@compiled
def test_a_torch_that_lacks_something_is_told(monkeypatch):
    monkeypatch.delattr(torch._C, "_dispatch_keys")
    assert "AttributeError: module 'torch._C' has no attribute '_dispatch_keys'" in bound_with(monkeypatch)


@compiled
def test_the_default_device_does_not_matter():
    code = "import torch; torch.set_default_device('meta'); from graphreplay_cuda import native; print(native.missing)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@compiled
def test_a_python_that_is_otherwise_is_told(monkeypatch):
    if sys.version_info >= (3, 12):
        full = Mock(side_effect=RuntimeError("no more dict watcher IDs available"))
        assert "no more dict watcher IDs available" in bound_with(monkeypatch, watch=full)
    else:
        monkeypatch.setattr(looks, "dict_version", lambda held: 0)
        assert "versions of its dicts elsewhere" in bound_with(monkeypatch)


def test_what_is_missing_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(native, "missing", None)
    native.warn_if_missing.cache_clear()
    native.warn_if_missing()
    assert not caplog.records
    monkeypatch.setattr(native, "missing", "it was not built")
    native.warn_if_missing.cache_clear()
    for _ in range(2):
        native.warn_if_missing()
    (record,) = caplog.records
    assert record.getMessage().endswith("so that calls take longer: it was not built")
    native.warn_if_missing.cache_clear()
