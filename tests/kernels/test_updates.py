"""The update kernels compared with the reference, bit for bit: compiled on a GPU, otherwise through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qsim_kernels import torch as reference
from qsim_kernels.numbers.updates import Algorithm, Roundings, Step
from support.comparing import same_bits
from support.side_by_side import DEVICE, kernels
from support.update_cases import CASES, SMALL, UpdateCase, run

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def differences(case: UpdateCase, arrange: Callable[[Tensor], Tensor] = lambda x: x) -> list[int]:
    """The tensors of a case that differ between reference and kernels."""
    due = run(reference.update, case, torch.device("cpu"))
    found = run(kernels.update, case, DEVICE, arrange)
    assert len(due) == len(found)
    return [number for number, (a, b) in enumerate(zip(due, found, strict=True)) if not same_bits(a, b)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_do_what_the_reference_does(case: UpdateCase) -> None:
    assert differences(case) == []


def strided(x: Tensor) -> Tensor:
    """The same numbers, every other one in memory."""
    return torch.stack([x, x], dim=-1)[..., 0]


def unaligned(x: Tensor) -> Tensor:
    """The same numbers after one that misaligns them."""
    return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arrange", [strided, unaligned])
@pytest.mark.parametrize("update", ["kahan", "stochastic"])
def test_memory_layouts_do_not_matter(update: str, arrange: Callable[[Tensor], Tensor]) -> None:
    case = UpdateCase("AMSGrad", update=update, steps=1, sizes=((2051,), (3, 5)))
    assert differences(case, arrange) == []


def test_transposed_tensors() -> None:
    case = UpdateCase("AdamW", sizes=((3, 5), (4, 2, 3)))
    assert differences(case, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)) == []


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_a_learning_rate_on_the_device(dtype: torch.dtype) -> None:
    lr = torch.tensor(0.3, dtype=dtype)
    case = UpdateCase("AdamW", sizes=SMALL)
    due = run(reference.update, case, torch.device("cpu"), lr=lr)
    found = run(kernels.update, case, DEVICE, lr=lr.to(DEVICE))
    assert all(map(same_bits, due, found))


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_steps_that_are_skipped(skip: float) -> None:
    def update(step: Step, algorithm: Algorithm, roundings: Roundings) -> None:
        kernels.update(step._replace(found_inf=torch.tensor(skip, device=DEVICE)), algorithm, roundings)

    case = UpdateCase("AMSGrad", arithmetic="format", sizes=SMALL)
    found = run(update, case, DEVICE)
    due = run(reference.update, case._replace(steps=0) if skip else case, torch.device("cpu"))
    assert all(map(same_bits, due, found))
