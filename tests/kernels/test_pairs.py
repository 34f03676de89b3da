"""Stochastic codes that a GPU finds two at a time are those of the definition, for all inputs of 16 bits."""

from __future__ import annotations

import pytest
import torch

import qsim
from qsim.random import Noise

#: So often that some of the values near zero need the last of their random bits.
REPEATS = 64


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "e3m4", "e2m5", "e5m1"])
def test_codes_of_all_inputs(name: str) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).repeat(REPEATS)
    expected = qsim.encode(x, name, rounding="stochastic", seed=Noise(7, 5), check=False)
    codes = qsim.encode(x.cuda(), name, rounding="stochastic", seed=Noise(torch.tensor(7, device="cuda"), 5), check=False)
    assert torch.equal(codes.cpu(), expected)
    # The end of a tensor that fills no block, and a piece that begins at another piece's end.
    piece = x.cuda()[2**16 :][: 2**16 - 5]
    codes = qsim.encode(piece, name, rounding="stochastic", seed=Noise(7, 5, offset=2**16), check=False)
    assert torch.equal(codes.cpu(), expected[2**16 :][: 2**16 - 5])
