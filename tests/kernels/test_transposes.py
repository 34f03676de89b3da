"""Codes of a matrix and of its transpose from one read: the kernel (compiled on a GPU, otherwise interpreted), bit for bit plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qsim import Quantizer, Stochastic
from qsim_kernels.numbers.encoding import spell_encoding
from qsim_kernels.ops.quantize import Implementation
from support.side_by_side import DEVICE, dealt

KERNEL = Implementation("qsim_kernels.triton")
REFERENCE = Implementation("qsim_kernels.torch")
STREAMS = 5, 2**40 + 1
NEAREST, NOISY, FEW = Quantizer("e4m3"), Quantizer("e5m2", "stochastic"), Quantizer("e4m3", Stochastic(5, correction=True))
#: Roundings in place and transposed, and whether the latter has the former's stream.
PAIRS = {
    "the same": (NEAREST, NEAREST, True),
    "the same, stochastic": (NOISY, NOISY, True),
    "drawn twice": (NOISY, NOISY, False),
    "two formats": (NEAREST, NOISY, False),
    "few bits": (FEW, Quantizer("e3m2"), True),
    "integers": (Quantizer("int8"), Quantizer("e2m1", "toward_zero"), True),
    "infinities": (Quantizer("e5m2", overflow="nonfinite"), Quantizer("e4m3", overflow="nonfinite"), True),
}


def values(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers of many magnitudes, with what has no code of its own."""
    x = torch.randn(shape) * torch.exp2(torch.randn(shape) * 6)
    flat = x.view(-1)
    flat[:5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    return x.to(dtype).to(DEVICE)


def arguments(point: Quantizer, stream: int, dtype: torch.dtype = torch.uint8) -> tuple[str, int, torch.dtype]:
    return spell_encoding(point.spelt.grid, point.spelt.rule, point.format.spelling[1]), stream, dtype


#: Whole tiles, rows of which the last tile is partly filled, columns that no wide load fits, and numbers that are rounded in float64.
MATRICES = [((64, 128), torch.bfloat16), ((9, 72), torch.float32), ((67, 5), torch.bfloat16), ((3, 9), torch.float64)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("pair", "shape", "dtype"), [(pair, *matrix) for turn, pair in enumerate(PAIRS) for matrix in dealt(MATRICES, turn, 2)]
)
def test_the_kernel_writes_the_codes_of_plain_torch(pair: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    one, other, shares = PAIRS[pair]
    given = (*arguments(one, STREAMS[0]), *arguments(other, STREAMS[not shares]))
    x, seed = values(shape, dtype), torch.tensor(-(3**25), device=DEVICE)
    codes, turned = KERNEL.encode_with_transpose(x, seed, *given)
    expected, expected_turned = REFERENCE.encode_with_transpose(x, seed, *given)
    assert turned.is_contiguous()
    assert torch.equal(codes, expected)
    assert torch.equal(turned, expected_turned)
    if pair == "the same, stochastic":
        assert torch.equal(codes.t(), turned)
        assert torch.equal(KERNEL.encode_transpose(x, seed, *given[:3]), turned)
