"""Tests that the compiled CPU loop transforms like plain torch, bit for bit, for all shapes, dtypes and numbers of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from qsim_kernels.numbers.scales import Turn
from qsim_kernels.torch.hadamard import hadamard as reference
from support.comparing import same_bits

hadamard = pytest.importorskip("qsim_kernels.numba.scaling", reason="needs numba").hadamard


def one_kind_of_nan(x: Tensor) -> Tensor:
    """The sign and the payload of a NaN that arithmetic made depend on the processor."""
    return torch.where(x.isnan(), torch.nan, x)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 5),
    length=st.integers(1, 150),
    inner=st.sampled_from([1, 2, 70]),
    power=st.integers(1, 7),
    signs=st.sampled_from([-1, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    magnitude=st.sampled_from([1.0, 1e30, 1e38]),
    is_transposed=st.booleans(),
)
def test_transforms_as_the_reference_does(
    rows: int, length: int, inner: int, power: int, signs: int, dtype: torch.dtype, magnitude: float, is_transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(length)
    x = (torch.randn(rows, length, inner, generator=generator, dtype=torch.float64) * magnitude).to(dtype)
    x.view(-1)[::29] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0]).to(dtype).repeat(x.numel())[: len(x.view(-1)[::29])]
    x = x.transpose(0, 2).contiguous().transpose(0, 2) if is_transposed else x
    turn = Turn(1 << power, length, inner, signs)
    assert same_bits(*(one_kind_of_nan(transform(x, turn)) for transform in (reference, hadamard)))


@pytest.mark.parametrize("shape", [(1 << 18,), (3, 1 << 12, 32), (300, 24, 37)], ids=str)
def test_threads_share_blocks_or_rows(shape: tuple[int, ...]) -> None:
    x, before = torch.randn(shape), torch.get_num_threads()
    turn = Turn(16, shape[1] if len(shape) > 1 else shape[0], shape[2] if len(shape) > 1 else 1, 5)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert same_bits(hadamard(x, turn), reference(x, turn))
    finally:
        torch.set_num_threads(before)
