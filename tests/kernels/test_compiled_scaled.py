"""Tests that compiled CPU loops round with scales like plain torch, bit for bit, for all scales, dtypes and threads."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import qsim
from qsim.functional.arguments import spelling
from qsim.scaling import PerBlock
from qsim_kernels.ops.scaled import Implementation
from support.comparing import first_difference
from support.covering import dealt
from support.scaled_settings import LARGE, REFERENCE, check, equal, setting

pytest.importorskip("qsim_kernels.numba", reason="needs numba")

LOOPS, CPU = Implementation("qsim_kernels.numba.scaling"), torch.device("cpu")
SCALE_FORMATS, SCALE_RULES = ["fp32", "e8m0", "e4m3", "e5m2", "e4m0", "int8"], ["fit", "ceil", "floor", "even", "ceil_log2"]


@settings(max_examples=120)
@given(number=st.integers(0, 2**32))
def test_loops_do_what_the_reference_does(number: int) -> None:
    check(LOOPS, CPU, setting(number, LARGE))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("format", SCALE_FORMATS)
def test_scales_of_all_magnitudes(format: str, rule: Any) -> None:
    steps = torch.arange(8, 17) * 2.0 ** torch.arange(-149, 124).unsqueeze(1)
    middles = torch.cat([steps, (steps[:, 1:] + steps[:, :-1]) / 2], 1).flatten().float() * 6
    bits = middles.view(torch.int32)
    near = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32).abs()
    amaxes = torch.cat([near, torch.tensor([0.0, math.inf, math.nan, 2.0**-149, 3e38])])
    under = [None, *map(torch.tensor, (1.0, 1.0000001, 3.1e-30, 2.0**-149, 7e25, 0.0, math.inf, math.nan))]
    for element in ("e2m1", "e4m3", "int8"):
        making = PerBlock(16, format=format, rule=rule).spelling(qsim.format(element))
        for whole in under:
            assert equal(amaxes, REFERENCE.scales(amaxes, whole, *making), LOOPS.scales(amaxes, whole, *making)), (element, whole)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_pair_of_dtypes(source: torch.dtype, target: torch.dtype) -> None:
    x = (torch.randn(6, 40) * 10.0 ** torch.arange(-4, 2).unsqueeze(1)).to(source)
    x[0, 3], x[1, 5] = math.nan, math.inf
    for restore, dim, rounding in dealt([(r, d, how) for r in (0, 1, 2) for d in (0, 1) for how in ("nearest", "stochastic", "up")], 0, 9):
        scaling, spelt = PerBlock(16, dim, "e8m0", "ceil"), spelling("e4m3", rounding, "saturate")
        how = (scaling.tiles(x.shape), (), *scaling.spelling(spelt.format), torch.tensor(5), spelt.grid, spelt.rule, 7, 3, target, restore)
        (one, own), (other, others) = REFERENCE.quantize_tiles(x, None, *how), LOOPS.quantize_tiles(x, None, *how)
        assert not first_difference(x, one, other), (restore, dim, rounding)
        assert equal(x, own, others)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(1, 2**19), (700, 800), (3, 2**18 + 5), (2**18, 3)])
def test_large_tensors_in_threads(shape: tuple[int, int]) -> None:
    before = torch.get_num_threads()
    x, spelt = torch.randn(shape).bfloat16(), spelling("e2m1", "stochastic", "saturate")
    torch.set_num_threads(3)
    try:
        for scaling in (PerBlock(32, -1, "e8m0", "ceil"), PerBlock(32, 0, "e8m0", "ceil")):
            making = scaling.tiles(shape), (), *scaling.spelling(spelt.format)
            how = (*making, torch.tensor(5), spelt.grid, spelt.rule, 7, 0, torch.bfloat16, 2)
            assert not first_difference(x, REFERENCE.quantize_tiles(x, None, *how)[0], LOOPS.quantize_tiles(x, None, *how)[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_rows_that_are_long_themselves_from_several_threads_at_once() -> None:
    # Each row is worth several threads, and so are the rows together: no thread may wait for others that are waiting, too.
    code = """
import threading, torch, qsim
torch.set_num_threads(2)
x = torch.randn(4, 2**18 + 5)
expected, found = qsim.quantize(x, "mxfp4"), []
threads = [threading.Thread(target=lambda: found.extend(qsim.quantize(x, "mxfp4") for _ in range(5))) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert len(found) == 20 and all(torch.equal(y, expected) for y in found)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
