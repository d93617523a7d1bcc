"""Which operators and methods count as host synchronization, and which of their neighbours do not."""

import pytest
import torch

from graphreplay.errors import HostSyncError
from graphreplay.hostsync import HostSyncProbe, probe_taken_over
from graphreplay.opmode import OpMode
from graphreplay.testing.zoo import rows

SYNCING = {
    "histc": lambda x: torch.histc(x, bins=4),
    "histc_of_one_bound": lambda x: torch.histc(x, bins=4, min=1, max=1),
    "nested": lambda x: torch._nested_tensor_from_mask(x[None], torch.ones(1, len(x), dtype=torch.bool)),
    "item": lambda x: x[0, 0].item(),
    "int": lambda x: int(x[0, 0]),
    "bool": lambda x: bool(x[0, 0]),
    "contains": lambda x: 1.0 in x,
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: x.__array__(),
    "tolist": lambda x: x.tolist(),
    "repr": repr,
    "str": str,
    "format": lambda x: f"{x[0, 0]:.1f}",
    "nonzero": torch.nonzero,
    "nonzero_as_tuple": lambda x: torch.nonzero(x, as_tuple=True),
    "argwhere": torch.argwhere,
    "where_of_one": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask_and_slice": lambda x: x[:, x[0] > 0],
    "byte_mask": lambda x: torch.ops.aten.index.Tensor(x, [(x > 0).byte()]),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "masked_tensor_write": lambda x: x.clone().__setitem__(x > 0, x[x.argsort() >= 0][:0]),
    "mask_in_two": lambda x: torch.ops.aten.index_put(x, [x[:, 0] > 0, torch.tensor([0])], torch.tensor(1.0)),
    "unique": torch.unique,
    "unique_consecutive": torch.unique_consecutive,
    "bincount": lambda x: torch.bincount(x.argsort()[0]),
    "one_hot": lambda x: torch.nn.functional.one_hot(x.argsort()),
    "repeat_interleave": lambda x: x[0].repeat_interleave(x[0].argsort()),
    "repeats_of_tensor": lambda x: torch.repeat_interleave(x[0].argsort()),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "is_nonzero": lambda x: torch.is_nonzero(x[0, 0]),
    "inv": lambda x: torch.linalg.inv(x[:2, :2]),
    "solve": lambda x: torch.linalg.solve(x[:2, :2], x[:2]),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.t()),
    "tensor_of_tensors": lambda x: torch.tensor([x[0, 0], 1.0]),
    "as_tensor_of_tensors": lambda x: torch.as_tensor((x[0, 0], 1.0)),
    "range_end": lambda x: torch.arange(x[0].argmax()),
    "slice_end": lambda x: x[: x[0].argmax()],
}
QUIET = {
    "histc_between_bounds": lambda x: torch.histc(x, bins=4, min=-1, max=1),
    "where_of_three": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "masked_scalar_write": lambda x: x.clone().__setitem__(x > 0, 1.0),
    "index": lambda x: x[torch.arange(2), torch.arange(2)],
    "index_put": lambda x: x.clone().__setitem__((torch.arange(2), torch.arange(2)), x[0, :2]),
    "repeat_by_int": lambda x: x.repeat_interleave(2, dim=0),
    "repeat_of_known_size": lambda x: x[0].repeat_interleave(x[0].argsort(), output_size=28),
    "shape": lambda x: x.shape[0] + x.numel() + x.stride(0) + len(x),
    "address": lambda x: x.data_ptr(),
    "iteration": list,
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(),
    "to_device": lambda x: x.to("cpu"),
    "to_dtype": lambda x: x.double(),
    "number": lambda x: torch.tensor([1.0, 2.0]) + x.new_tensor([3.0, 4.0]),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(x @ x.t()),
    "linear": lambda x: torch.nn.functional.linear(x, x),
    "count_nonzero": torch.count_nonzero,
}


@pytest.fixture(params=[torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda mode: mode.__name__)
def mode(request):
    return request.param


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("name", SYNCING)
def test_refused(name, mode):
    with mode():
        x = rows(3)
        with pytest.raises(HostSyncError, match=r"test_hostsync\.py:\d+"), HostSyncProbe("cpu"):
            SYNCING[name](x)


@pytest.mark.parametrize("name", QUIET)
def test_allowed(name, mode):
    with mode():
        x = rows(3)
        with HostSyncProbe("cpu"):
            QUIET[name](x)


def test_outside_the_body_nothing_is_refused():
    with HostSyncProbe("cpu"):
        pass
    assert rows(3)[0, 0].item() == rows(3).tolist()[0][0]


def test_the_body_goes_on_and_its_first_wait_is_told():
    done = []
    with pytest.raises(HostSyncError, match=r"^Tensor\.tolist\(\)"), HostSyncProbe("cpu"):
        done.append(torch.tensor([3]).tolist())  # other ranks wait for what comes behind it
        done.append(torch.ones(()).item())
    assert done == [[3], 1.0]


def test_what_raises_behind_a_wait_may_come_of_it():
    with pytest.raises(HostSyncError, match="local_scalar") as caught, HostSyncProbe("cpu"):
        raise ValueError(str(torch.ones(()).item()))
    assert repr(caught.value.__cause__) == "ValueError('1.0')"


def test_message_names_what_and_where():
    def model(x):
        return x.cpu()

    line = model.__code__.co_firstlineno + 1
    with pytest.raises(HostSyncError) as caught, HostSyncProbe("cpu"):
        model(rows(3))
    assert str(caught.value).startswith(f"Tensor.cpu() at {__file__}:{line} in model ")


class _Counts(OpMode):
    def __init__(self):
        super().__init__()
        self.ops = 0

    def on_op(self, op, args, kwargs):
        self.ops += 1
        return op(*args, **kwargs)


def test_a_probe_below_another_mode_stays_where_it_is():
    """Taking it off would take the other one off: that of ranks, which counts collectives."""
    counts = _Counts()
    with pytest.raises(HostSyncError, match="makes the host wait"), HostSyncProbe("cpu"):
        with counts:
            with probe_taken_over() as probe:
                assert probe is None
                torch.ones(2).add(1)
            assert counts.ops == 2
            torch.ones(2)[0].item()
        assert counts.ops > 3
    assert torch._C._len_torch_dispatch_stack() == 0
    with HostSyncProbe("cpu"):
        with probe_taken_over() as probe:
            assert probe is not None
            assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._len_torch_dispatch_stack() == 1
