"""What counts as a difference between two tensors."""

import pytest
import torch

from graphreplay.verify import _tensors_differ

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("got", "wanted", "said"),
    [
        (torch.tensor([1.0, NAN, INF]), torch.tensor([1.0, NAN, INF]), None),
        (torch.tensor([]), torch.tensor([]), None),
        (torch.tensor([0.0]), torch.tensor([-0.0]), None),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), "1 of 2 values differ, nan and not 2.0 at (1,)"),
        (torch.tensor([INF]), torch.tensor([-INF]), "1 of 1 values differ, inf and not -inf at (0,)"),
        (torch.tensor(3), torch.tensor(4), "1 of 1 values differ, 3 and not 4"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "1 of 2 values differ, False and not True at (1,)"),
        (
            torch.tensor([1.0]).nextafter(torch.tensor(2.0)),
            torch.tensor([1.0]),
            "1 of 1 values differ, 1.0000001192092896 and not 1.0 at (0,)",
        ),
        (torch.ones(2, 1), torch.ones(2), "(2, 1) of torch.float32 on cpu and not (2,) of torch.float32 on cpu"),
        (torch.ones(1).half(), torch.ones(1), "(1,) of torch.float16 on cpu and not (1,) of torch.float32 on cpu"),
        (torch.tensor([1 + 2j, NAN]), torch.tensor([1 + 2j, NAN]), None),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), "1 of 1 values differ, (1+2j) and not (1-2j) at (0,)"),
        (
            torch.tensor([2**62 + 1]),
            torch.tensor([2**62]),
            f"1 of 1 values differ, {2**62 + 1} and not {2**62} at (0,)",
        ),
    ],
)
def test_on_the_cpu_every_bit_counts(got, wanted, said):
    assert _tensors_differ(got, wanted) == said
