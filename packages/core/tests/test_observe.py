"""What the observer sees of one forward, and how a snapshot undoes it."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from graphreplay.errors import CaptureError, HostSyncError
from graphreplay.hostsync import HostSyncProbe
from graphreplay.observe import Observer
from graphreplay.plainops import KNOWN_PARTS, plain_op
from graphreplay.snapshot import Snapshot
from graphreplay.storage import storage_ids
from graphreplay.testing.zoo import rows


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__, autouse=True)
def mode(request):
    with request.param():
        yield


def observe(forward, static=()):
    snapshot = Snapshot()
    observer = Observer(torch.device("cpu"), storage_ids(static), snapshot)
    with observer.watching():
        forward()
    return observer, snapshot


def test_outside_holds_what_was_read_and_nothing_made_inside():
    weight, bias, unused = rows(8), rows(1, 1), rows(2)
    x = rows(3)

    def forward():
        y = torch.zeros(3, 8) + x @ weight
        return (y + bias[0]).softmax(-1) * torch.tensor([2.0]) * torch.arange(8)

    observer, _ = observe(forward, [x])
    assert set(observer.outside) == set(storage_ids([weight, bias]))
    assert unused.untyped_storage()._cdata not in observer.outside
    assert observer.written == set()


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t[1:].zero_(),
        lambda t: t.t()[0].fill_(7),
        lambda t: t.__setitem__((0, 0), 5.0),
        lambda t: torch.mul(t, 2, out=t),
        lambda t: torch._foreach_add_([t], 1.0),
        lambda t: t.index_copy_(0, torch.tensor([1]), t[:1] + 1),
        lambda t: t.view(-1).scatter_(0, torch.tensor([0]), 9.0),
        lambda t: t.copy_(torch.zeros_like(t)),
        lambda t: t.normal_(),
        lambda t: t.masked_fill_(t > 0, 3.0),
        lambda t: nn.functional.relu(t, inplace=True),
    ],
)
def test_writes_are_seen_and_undone(write):
    outside, static = rows(3, 1), rows(3, 2)
    before = outside.clone()

    def forward():
        write(outside)
        write(static)
        write(torch.ones(3, 8))

    observer, snapshot = observe(forward, [static])
    assert observer.written == set(storage_ids([outside, static]))
    assert observer.written_static([rows(3), static])[0] is static
    assert not torch.equal(outside, before)
    changed = static.clone()
    snapshot.restore()
    assert torch.equal(outside, before)
    assert torch.equal(static, changed), "static inputs are no business of the snapshot"


def test_running_statistics_are_seen_and_undone():
    norm = nn.BatchNorm1d(8)
    buffers = [b.clone() for b in norm.buffers()]
    observer, snapshot = observe(lambda: norm(rows(3)))
    assert observer.written == set(storage_ids(list(norm.buffers())))
    snapshot.restore()
    assert all(map(torch.equal, norm.buffers(), buffers))
    observer, _ = observe(lambda: norm.eval()(rows(3)))
    assert observer.written == set()


def test_snapshot_saves_whole_storages_once():
    base = rows(4)
    before = base.clone()
    snapshot = Snapshot([base[1:2]])
    base.zero_()
    snapshot.add(base)  # too late: the first state counts
    snapshot.restore()
    assert torch.equal(base, before)
    base.zero_()
    snapshot.restore()
    assert torch.equal(base, before)


def test_snapshot_restores_without_grad_and_version_errors():
    with torch.inference_mode(False), torch.enable_grad():
        weight = nn.Parameter(rows(2))
        snapshot = Snapshot([weight])
        with torch.no_grad():
            weight.zero_()
        snapshot.restore()
        assert torch.equal(weight.detach(), rows(2))
        assert weight.requires_grad


_outside = rows(3, 1)
_generator = torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("forward", "repeatable"),
    [
        (lambda x: x @ x.t(), True),
        (lambda x: x.add_(1), True),  # a static input, which the next call stages anew
        (lambda x: nn.functional.dropout(x, 0.5, training=False), True),
        (lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]), True),
        (lambda x: nn.functional.dropout(x, 0.5), False),
        (lambda x: x + torch.rand(8), False),
        (lambda x: x + torch.rand(8, generator=_generator), False),
        (lambda x: _outside.add_(x), False),
    ],
    ids=["matmul", "writes input", "no dropout", "attention", "dropout", "draws", "own generator", "writes outside"],
)
def test_a_forward_is_repeatable_if_it_leaves_nothing_behind(forward, repeatable):
    x = rows(3)
    observer, snapshot = observe(lambda: forward(x), [x])
    snapshot.restore()
    assert observer.repeatable is repeatable


@pytest.mark.parametrize("why", [None, "graphs of this test hold none"])
def test_collectives_are_refused_before_they_are_issued_where_graphs_hold_none(why, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        issued, observer = [], Observer(torch.device("cpu"), (), Snapshot(), ranks=[0], why_no_collectives=why)
        try:
            with observer.watching():
                issued.append(dist.all_reduce(rows(3), async_op=True))
        except CaptureError as error:
            issued.append(str(error))
    finally:
        dist.destroy_process_group()
    assert len(issued) == 1
    assert (issued == ["the forward runs collectives: graphs of this test hold none"]) is (why is not None)


def test_a_storage_in_the_place_of_a_dead_intermediate_is_still_from_outside():
    x, made = rows(3), []

    def forward():
        y = x
        for _ in range(64):
            y = torch.sin(x)  # dies in the next round, and its number would be free for the next storage
        for _ in range(64):
            # As a library or another thread makes one, without an operator.
            made.append(torch.UntypedStorage(96))
            with torch._C._DisableTorchDispatch():
                tensor = torch.empty(0).set_(made[-1], 0, (3, 8), (8, 1))
            y = y + tensor
        return y

    observer, _ = observe(forward, [x])
    assert {storage._cdata for storage in made} <= observer.outside.keys()


_weight = nn.Parameter(rows(8, 2))
_bias = nn.Parameter(rows(8, 2)[0])
_kernel = torch.ones(1, 3, 3)
WHOLE = {
    "aten::linear": lambda x: nn.functional.linear(x[None], _weight, _bias),
    "aten::matmul": lambda x: x[None] @ _weight,
    "aten::reshape": lambda x: x.t().reshape(-1),
    "aten::flatten.using_ints": lambda x: (x.t().flatten(), _bias.flatten()),
    "aten::unflatten.int": lambda x: x.unflatten(1, (2, 4)),
    "aten::chunk": lambda x: x.chunk(2, -1),
    "aten::contiguous": lambda x: (x.t().contiguous(), _weight.contiguous()),
    "aten::to.dtype": lambda x: (x.to(torch.float64), _weight.to(torch.float32), x.double()),
    "aten::layer_norm": lambda x: nn.functional.layer_norm(x, (8,), _bias, _bias),
    "aten::rms_norm": lambda x: nn.functional.rms_norm(x, (8,), _bias),
    "aten::group_norm": lambda x: nn.functional.group_norm(x, 2, _bias, _bias),
    "aten::softmax.int": lambda x: x.softmax(-1),
    "aten::log_softmax.int": lambda x: x.log_softmax(-1),
    "aten::conv1d": lambda x: nn.functional.conv1d(x[None], _kernel, padding=1),
    "aten::conv2d": lambda x: nn.functional.conv2d(x[None], _kernel[None]),
    "aten::einsum": lambda x: torch.einsum("ij,kj->ik", x, _weight),
    "aten::pad": lambda x: [nn.functional.pad(x[None], (1, 1), mode) for mode in ("constant", "reflect", "circular")],
    "aten::where.Scalar": lambda x: torch.where(x > 0, 1.0, 0.0),
    "aten::where.ScalarOther": lambda x: torch.where(x > 0, _weight[:3], 0.0),
    "aten::where.ScalarSelf": lambda x: torch.where(x > 0, 0.0, _weight[:3]),
    "aten::repeat_interleave.self_int": lambda x: (x.repeat_interleave(2), x.repeat_interleave(2, dim=0)),
}


def test_every_composite_operator_that_runs_whole_is_tried():
    assert set(WHOLE) == KNOWN_PARTS


@pytest.mark.parametrize("name", WHOLE)
def test_composite_operators_that_run_whole_show_what_their_parts_show(name):
    seen = []
    for one_by_one in (False, True):
        ops, given, made = set(), [rows(3, 1)], []
        plain = (lambda op, ops=ops: ops.add(op.name())) if one_by_one else plain_op
        with mock.patch("graphreplay.observe.plain_op", plain), HostSyncProbe("cpu"):
            observer, _ = observe(lambda given=given, made=made: made.append(WHOLE[name](*given)), given)
        seen.append((set(observer.outside), repr(made)))
        assert observer.written == set()
        assert observer.repeatable
    assert seen[0] == seen[1]
    assert name in ops or not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (lambda x: x * rows(3), "mul.Tensor"),
        (lambda x: nn.functional.linear(x, rows(3)), "mm.default"),
        (lambda x: torch.cat([x, rows(3)]), "cat.default"),
        (lambda x: x * torch.ones(()), None),  # of a number on the host the value is read, at launch
        (lambda x: nn.functional.linear(x, x), None),
    ],
)
def test_tensors_of_two_devices_in_one_operator_are_found(forward, what):
    x = torch.ones(3, 8, device="meta")
    with pytest.raises(HostSyncError, match=f"aten.{what} ") if what else nullcontext(), HostSyncProbe("meta"):
        observe(lambda: forward(x), [x])
