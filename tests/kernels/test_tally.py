"""Tallies of rounding outcomes: loops and the kernel compared with plain torch; `test_monitor.py` compares counts with Python's numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import qsim
from qsim.formats import Format
from qsim_kernels.numbers import tallies
from qsim_kernels.ops.quantize import Implementation
from qsim_kernels.torch.reductions import tally
from support.inputs import DTYPES
from support.side_by_side import DEVICE, difficult


def moderate(fmt: Format, dtype: torch.dtype) -> Tensor:
    """Numbers of all kinds whose squares float64 holds."""
    x = difficult(fmt, dtype).to(torch.float64)
    small = torch.where(x.isfinite() & (x.abs() > 2.0**400), x.sign() * 2.0**400, x).to(dtype)
    return torch.cat([small, small.new_tensor([0.0, -0.0, math.inf, -math.inf, math.nan, fmt.max, fmt.min, fmt.smallest])])


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loops_against_reference(dtype: torch.dtype, target: torch.dtype) -> None:
    loops = pytest.importorskip("qsim_kernels.numba.reductions", reason="needs numba")
    fmt = qsim.format("e5m2")
    x = moderate(fmt, dtype).cpu()
    rounded = qsim.quantize(x, fmt, overflow="nonfinite", dtype=target)
    for elements, q in ((x, rounded), (x[1::2], rounded[1::2]), (x[:1], rounded[:1]), (x[:0], rounded[:0])):
        (counts, sums), (due, added) = loops.tally(elements, q, fmt.min, fmt.max), tally(elements, q, fmt.min, fmt.max)
        assert torch.equal(counts, due)
        assert sums.tolist() == pytest.approx(added.tolist(), rel=1e-12)


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    x, before = torch.randn(1 << 18), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(torch.ops.qsim.tally(x, x.bfloat16(), -1.0, 1.0))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_against_reference(dtype: torch.dtype, wide: bool) -> None:
    pytest.importorskip("triton")
    from qsim_kernels.triton.reductions import tally as kernel

    fmt = qsim.format("e5m2")
    x = moderate(fmt, dtype).to(DEVICE)
    rounded = qsim.quantize(x, fmt, overflow="nonfinite", dtype=torch.float64 if wide else None)
    for elements, q in ((x, rounded), (x[:1], rounded[:1]), (x[1::2], rounded[1::2]), (x[:0], rounded[:0])):
        found = []
        for counted in (tally, kernel.tally):
            counts, sums = counted(elements, q, fmt.min, fmt.max)
            found.append((counts.tolist(), sums.tolist()))
        assert found[0][0] == found[1][0]
        assert sum(found[0][0][: tallies.FIELDS]) == elements.numel()
        assert found[0][1] == pytest.approx(found[1][1], rel=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [5_000_011, 10_000_019])
def test_many_programs(count: int) -> None:
    x = torch.randn(count, device="cuda", dtype=torch.bfloat16)
    rounded = qsim.quantize(x, "e2m1")
    counts, _ = torch.ops.qsim.tally(x, rounded, -6.0, 6.0)
    expected, _ = torch.ops.qsim.tally(x.cpu(), rounded.cpu(), -6.0, 6.0)
    assert counts.tolist() == expected.tolist()


def test_as_torch_sees_it(device: torch.device) -> None:
    x = torch.randn(5, 6, device=device)
    torch.library.opcheck(torch.ops.qsim.tally.default, (x, qsim.quantize(x, "e2m1"), -6.0, 6.0))
    with pytest.raises(ValueError, match=r"tally: x has shape \(5, 6\), rounded \(5,\): they must be the same"):
        Implementation("qsim_kernels.torch").tally(x, x[:, 0], -6.0, 6.0)
