"""Copies by storage: regions of tensors that share or overlap, alignment, and what is counted."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphreplay.storage import CopyPlan, byte_view, layout, maker_of, sharing_pattern, storage_ids
from graphreplay.testing.compare import sharing, tensor_bytes
from graphreplay.testing.recipes import DTYPES, LAYOUTS, lay_out, shapes


def clone(*tensors):
    copies = CopyPlan(tensors).clone(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert tensor_bytes(copy) == tensor_bytes(tensor)
    assert sharing(copies) == sharing(list(tensors))
    assert set(storage_ids(copies)).isdisjoint(storage_ids(tensors))
    return copies


@st.composite
def views_over_one_storage(draw):
    """Views of any dtype, offset, size and stride over one storage of bytes: they may overlap themselves too."""
    base = torch.arange(128, dtype=torch.uint8) % 2
    views = []
    for _ in range(draw(st.integers(1, 4))):
        typed = base.view(draw(st.sampled_from(DTYPES)))
        offset = draw(st.integers(0, typed.numel() - 1))
        shape, strides, reach = [], [], typed.numel() - 1 - offset
        for _ in range(draw(st.integers(0, 3))):
            stride = draw(st.integers(0, 3))
            size = draw(st.integers(0, min(4, 1 + reach // stride) if stride else 4))
            reach -= max(size - 1, 0) * stride
            shape.append(size)
            strides.append(stride)
        views.append(typed.as_strided(shape, strides, offset))
    return views


@given(views_over_one_storage())
def test_views_over_one_storage_stay_such(views):
    copies = clone(*views)
    marked = next((index for index, view in enumerate(views) if view.numel()), None)
    if marked is not None:  # a write to one shows in the others alike
        index = (0,) * views[marked].dim()
        for tensors in (views, copies):
            tensors[marked][index] = 1
        assert list(map(tensor_bytes, copies)) == list(map(tensor_bytes, views))


@given(st.integers(0, 40), st.sampled_from(DTYPES))
def test_a_region_keeps_its_alignment(offset, dtype):
    base = torch.zeros(64, dtype=torch.complex128).view(dtype)
    view = base[offset : offset + 3]
    copy, again = clone(view, view[:])
    assert copy.data_ptr() % 16 == view.data_ptr() % 16
    assert again.data_ptr() == copy.data_ptr()


def like(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


@given(shapes(), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS), st.permutations(range(4)))
def test_memory_for_copies_has_the_strides_of_the_tensors(shape, dtype, how, order):
    tensor = lay_out(shape, dtype, how, random.Random(3))
    tensor = tensor.permute([dim for dim in order if dim < tensor.dim()])  # dense in any order of dimensions
    plan = CopyPlan([tensor, torch.ones(2)])
    gaps, overlaps = layout(tensor)
    assert plan.is_simple == (tensor.numel() > 0 and not gaps and not overlaps)
    copies = plan.allocate([tensor, torch.ones(2)])
    assert like(copies[0]) == like(tensor)
    assert not copies[0].requires_grad
    clone(tensor)
    if plan.is_simple:
        assert like(torch.empty_like(tensor)) == like(maker_of([tensor])()[0]) == like(tensor)
        assert copies[0].untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=4))
def test_odd_strides_of_dimensions_of_length_one_are_kept(dims):
    """Whatever torch says of them, such a tensor is dense, and empty_like keeps its strides."""
    shape, strides, reach = [], [], 1
    for size, odd in dims:
        shape.append(size)
        strides.append(odd if size == 1 else reach)
        reach *= size
    tensor = torch.arange(float(reach)).as_strided(shape, strides)
    plan = CopyPlan([tensor])
    assert plan.is_simple
    (copy,) = plan.allocate([tensor])
    assert like(copy) == like(maker_of([tensor])()[0]) == like(tensor)
    clone(tensor)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_makers_make_ordinary_tensors_of_the_current_mode(mode):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with mode():
        make = maker_of([weight, weight])
        (made, other), wanted = make(), torch.empty_like(weight)
    for tensor in (made, other):
        assert (type(tensor), tensor.is_inference()) == (type(wanted), wanted.is_inference())
        assert (tensor.requires_grad, tensor.is_leaf, tensor.grad_fn) == (False, True, None)
    assert made.data_ptr() != other.data_ptr()


@pytest.mark.parametrize(
    ("tensors", "simple"),
    [
        ([], True),
        ([torch.ones(2), torch.ones(3, 2).t(), torch.ones(())], True),
        ([torch.nn.Parameter(torch.ones(2))], True),
        ([torch.ones(8)[2:5]], True),
        ([torch.ones(2), torch.ones(0)], False),
        ([torch.ones(8)[::2]], False),
        ([torch.ones(1).expand(3)], False),
        ([torch.ones(2).expand(3, 2)], False),
        ([torch.ones(8)[:4], torch.ones(2)] * 2, False),
        (list(torch.ones(8).split(4)), False),
        ([torch.ones(2, dtype=torch.complex64).conj()], False),
        ([torch.ones(2, dtype=torch.complex64).conj().imag], False),
    ],
)
def test_which_plans_are_simple(tensors, simple):
    plan = CopyPlan(tensors)
    assert plan.is_simple is simple
    assert list(map(like, plan.allocate(tensors)))[: len(tensors)] == [
        (*like(tensor)[:4], *((False, False) if not plan.has_regions else like(tensor)[4:])) for tensor in tensors
    ]
    clone(*tensors)


def test_an_empty_view_before_others_does_not_move_them():
    base = torch.arange(4.0, dtype=torch.float64)
    empty, whole = clone(base.view(torch.float32)[1:1], base)
    assert empty.shape == (0,)
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("rows", [0, 1])
def test_an_empty_view_beyond_the_end_of_a_storage_does_not_make_it_grow(rows):
    base = torch.ones(rows, 4)
    tensors = [base, base.as_strided((0, 3), (4, 1), 50)]
    plan = CopyPlan(tensors)
    size = base.untyped_storage().nbytes()
    copies = plan.clone(tensors)
    assert base.untyped_storage().nbytes() == size
    assert torch.equal(copies[0], base)
    assert (copies[1].shape, copies[1].storage_offset()) == ((0, 3), 50)


def test_a_storage_that_starts_at_an_odd_address():
    data = torch.frombuffer(bytearray(range(41)), dtype=torch.uint8, offset=1)[:40]
    copy, halves = clone(data, data[3:7])
    halves.fill_(0)
    assert copy.tolist() == [1, 2, 3, 0, 0, 0, 0, *range(8, 41)]


def test_only_the_stretch_between_the_views_is_copied():
    base = torch.arange(1000.0)
    plan = CopyPlan([base[500:502], base[504:505]])
    assert plan.nbytes == 5 * 4
    first, last = plan.clone([base[500:502], base[504:505]])
    assert first.tolist() == [500.0, 501.0]
    assert last.tolist() == [504.0]
    assert first.untyped_storage().nbytes() < 64


def test_an_expanded_tensor_stays_small():
    plan = CopyPlan([torch.ones(1).expand(1000)])
    assert plan.nbytes == 4
    assert plan.has_regions
    (copy,) = clone(torch.ones(3, 1).expand(3, 1000))
    assert copy.untyped_storage().nbytes() <= 12 + 16


def test_a_self_overlapping_view_is_written_as_one():
    windows = torch.arange(6.0).as_strided((4, 3), (1, 1))
    (copy,) = clone(windows)
    copy[0, 1] = 9.0
    assert copy[1, 0].item() == 9.0


@pytest.mark.parametrize(
    ("tensor", "nbytes", "regions"),
    [
        (torch.ones(2, 3), 24, False),
        (torch.ones(2, 3).t(), 24, False),
        (torch.ones(2, 8)[:, ::2], 4 * 15, False),
        (torch.ones(()), 4, False),
        (torch.ones(0, 5), 0, False),
        (torch.ones(5)[1:2].expand(3), 4, True),
        (torch.arange(6.0).as_strided((4, 3), (1, 1)), 24, True),
        (torch.ones(1, 2).expand(1, 2), 8, False),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), 480, False),
        (torch.ones(4, dtype=torch.bool), 4, False),
    ],
)
def test_bytes_and_regions_of_one_tensor(tensor, nbytes, regions):
    plan = CopyPlan([tensor])
    assert (plan.nbytes, plan.has_regions) == (nbytes, regions)
    clone(tensor)


def test_many_tensors_alone_take_one_fused_copy_a_dtype():
    ran = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func.overloadpacket)
            return func(*args, **kwargs or {})

    source = [torch.ones(2), torch.ones(3, 2), torch.ones(2).int(), torch.ones(4).int(), torch.ones(1, 4)[:, ::2]]
    plan = CopyPlan(source)
    into = plan.allocate(source)
    with Spy():
        plan.copy(into, source)
    assert sorted(map(str, ran)) == ["aten._foreach_copy_", "aten._foreach_copy_", "aten.copy_"]


def test_the_sharing_pattern_names_the_first_tensor_the_distance_in_bytes_and_the_object():
    x, y = torch.zeros(8), torch.zeros(8)
    tensors = [y, x[2:], x, x.view(torch.int16)[1:], y[:0], torch.zeros(0), torch.zeros(0), x]
    assert sharing_pattern(tensors, storage_ids(tensors)) == ((2, 1, -8, 2), (3, 1, -6, 3), (4, 0, 0, 4), (7, 1, -8, 2))


def test_the_sharing_pattern_of_strangers_is_empty():
    tensors = [torch.zeros(0), torch.zeros(0), torch.zeros(2), torch.zeros(2)]
    assert sharing_pattern(tensors, storage_ids(tensors)) == ()


LAZY = pytest.mark.parametrize("lazy", [lambda z: z.conj(), lambda z: z.conj().imag], ids=["conj", "neg"])


@LAZY
def test_lazy_views_over_one_storage_stay_lazy(lazy):
    z = torch.tensor([1 + 2j, 3j])
    copy, view = clone(z, lazy(z))
    copy[0] = 5 + 7j
    assert view[0].item() == lazy(copy)[0].item() == (5 - 7j if view.is_complex() else -7.0)


@LAZY
def test_lazy_views_alone_are_resolved(lazy):
    alone = [lazy(torch.tensor([1 + 2j, 3j]))]
    (copy,) = CopyPlan(alone).clone(alone)
    assert copy.tolist() == alone[0].tolist()
    assert (copy.is_conj(), copy.is_neg()) == (False, False)


@LAZY
def test_lazy_views_cannot_be_copied_by_their_bytes_onto_others(lazy):
    z = torch.tensor([1 + 2j, 3j])
    resolved = z if lazy(z).is_conj() else z.imag
    for planned, current in [(resolved[:], lazy(z)), (lazy(z), resolved[:])]:
        plan = CopyPlan([torch.ones(1), z, planned])
        assert plan.uncopyable([torch.ones(1), z, current]) == 2
        assert plan.uncopyable([torch.ones(1), z, planned]) is None
    assert CopyPlan([lazy(z)]).uncopyable([resolved]) is None


def test_one_object_under_two_names_stays_one():
    x, y = torch.arange(3.0), torch.ones(2)
    first, other, again, view = clone(x, y, x, x[1:])
    assert again is first
    assert view is not first
    assert other.untyped_storage()._cdata != first.untyped_storage()._cdata
    alone, twin = clone(y, y)
    assert twin is alone
    assert not CopyPlan([y, y]).has_regions
    assert CopyPlan([y, y]).nbytes == 8


def test_a_byte_view_shows_a_stretch_of_the_storage():
    x = torch.tensor([1, 256], dtype=torch.int16)
    assert byte_view(x).tolist() == [1, 0, 0, 1]
    assert byte_view(x[1:], 2, 2).tolist() == [0, 1]
    byte_view(x)[0] = 5
    assert x[0].item() == 5
