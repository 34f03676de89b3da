"""Tallies of rounding outcomes compared with Python's own numbers, and the kernel with plain torch."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

import qsim
from qsim.formats import FP16, Format
from qsim_kernels.numbers import tallies
from qsim_kernels.ops.quantize import Implementation
from qsim_kernels.torch.reductions import tally
from support.inputs import DTYPES
from support.side_by_side import DEVICE, difficult

FORMATS: list[Format] = [qsim.format(name) for name in ("e4m3", "e5m2", "e2m1", "e4m0", "e8m0", "int8", "fp16")]
FORMATS += [qsim.Float(4, 3, signed=False), qsim.Float(5, 2, subnormals=False)]


def told(x: Tensor, rounded: Tensor, fmt: Format) -> tuple[Counter[int], float, float]:
    """The expected counts and sums, in Python's numbers, element by element."""
    counts: Counter[int] = Counter()
    signal, noise = [], []
    for v, q in zip(x.flatten().tolist(), rounded.flatten().tolist(), strict=True):
        finite = math.isfinite(v)
        field = math.frexp(v)[1] - 1 + tallies.BIAS if finite and v else 0
        counts[min(max(field, 0), tallies.LARGEST) if finite else tallies.SPECIAL] += 1
        if v == 0:
            counts[tallies.ZERO] += 1
        if math.isnan(v):
            counts[tallies.NAN] += 1
        elif v > fmt.max or v < fmt.min:
            counts[tallies.SATURATED] += 1
        elif q == 0 and v != 0:
            counts[tallies.UNDERFLOWED] += 1
        elif q == v:
            counts[tallies.EXACT] += 1
        if finite and math.isfinite(q):
            signal.append(v * v)
            noise.append((v - q) ** 2)
    return counts, math.fsum(signal), math.fsum(noise)


def moderate(fmt: Format, dtype: torch.dtype) -> Tensor:
    """Numbers of all kinds whose squares float64 holds."""
    x = difficult(fmt, dtype).to(torch.float64)
    small = torch.where(x.isfinite() & (x.abs() > 2.0**400), x.sign() * 2.0**400, x).to(dtype)
    return torch.cat([small, small.new_tensor([0.0, -0.0, math.inf, -math.inf, math.nan, fmt.max, fmt.min, fmt.smallest])])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_counts_are_those_of_python(fmt: Format, dtype: torch.dtype, overflow: str) -> None:
    if dtype == torch.bfloat16 and fmt == FP16:
        pytest.skip("bfloat16 does not hold float16")
    x = moderate(fmt, dtype)
    rounded = qsim.quantize(x, fmt, rounding="stochastic", overflow=overflow, seed=5, dtype=torch.float64)
    counts, sums = torch.ops.qsim.tally(x, rounded, fmt.min, fmt.max)
    expected, signal, noise = told(x, rounded, fmt)
    assert {place: count for place, count in enumerate(counts.tolist()) if count} == expected
    assert expected[tallies.EXACT] > 5
    assert sums.tolist() == pytest.approx([signal, noise], rel=1e-12)


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
