"""Every float32 number through the Triton kernels and the reference, both on the GPU: not a single bit may differ.

As a script, `PYTHONPATH=tests python tests/kernels/test_gpu_exhaustive.py [FORMAT …]` prints a table of how many of the 2**32 results
differ. On an H200 a format takes about 16 seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import Stochastic, rounding as roundings
from qsim.formats import BF16, E2M1, E3M2, E4M3, E5M2, E8M0, FP16, Float, Format, Int, holds
from qsim_kernels import torch as reference
from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import GridRounding
from qsim_kernels.torch import chunks
from support.comparing import raw

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

#: Numbers that are compared at a time. The reference's temporaries for this many take about 6 GB.
CHUNK = 1 << 26
DEVICE = torch.device("cuda")
SEED = -6148914691236517206

FORMATS: tuple[Format, ...] = (
    E4M3,
    E5M2,
    E2M1,
    E3M2,
    Float(4, 0),
    FP16,
    BF16,
    E8M0,
    Int(8),
    Float(4, 3, subnormals=False),
)

#: The eight named modes, and few random bits, which are assigned differently.
ROUNDINGS: dict[str, roundings.Rounding] = {
    **roundings.NAMED,
    "6 bits": Stochastic(6),
    "16 bits, corrected": Stochastic(16, correction=True),
}


@contextmanager
def large_chunks() -> Iterator[None]:
    """Make the reference process as many numbers at a time as are compared: chunks for a CPU cache do not keep a GPU busy."""
    before = chunks.CHUNK
    chunks.CHUNK = CHUNK
    try:
        yield
    finally:
        chunks.CHUNK = before


@pytest.fixture(autouse=True)
def _large_chunks() -> Iterator[None]:
    with large_chunks():
        yield


def patterns(every: int = 1) -> Iterator[tuple[int, Tensor]]:
    """All float32 numbers, in order of their bit patterns as signed integers, in chunks, each with the logical index of its first.

    Args:
        every: Take only one chunk of so many, to see how long all of them would take.
    """
    place = torch.arange(CHUNK, dtype=torch.int32, device=DEVICE)
    for start in range(0, 2**32, CHUNK * every):
        yield start, (place + (start - 2**31)).view(torch.float32)


def count_differences(a: Tensor, b: Tensor) -> int:
    """The number of elements that differ in a bit."""
    return 0 if torch.equal(raw(a), raw(b)) else int((raw(a) != raw(b)).sum())


def quantized_differently(fmt: Format, rounding: roundings.Rounding, overflow: str, dtype: torch.dtype, every: int = 1) -> int:
    """The number of float32 numbers that the two implementations round differently into a dtype."""
    from qsim_kernels import triton

    rule, seed = rounding.rule(overflow), torch.tensor(SEED)
    a, b = (torch.empty(CHUNK, dtype=dtype, device=DEVICE) for _ in range(2))
    differences = 0
    for start, x in patterns(every):
        a.fill_(77)
        triton.quantize_into(a, x, GridRounding(fmt.grid, rule), (seed, 3, start))
        reference.quantize_into(b, x, GridRounding(fmt.grid, rule), (seed, 3, start))
        differences += count_differences(a, b)
    return differences


def encoded_differently(fmt: Format, rounding: roundings.Rounding, overflow: str, every: int = 1) -> int:
    """The number of float32 numbers with different codes, including those that decode to other values."""
    from qsim_kernels import triton

    rule, seed = rounding.rule(overflow), torch.tensor(SEED)
    a, b = (torch.empty(CHUNK, dtype=torch.uint8 if fmt.bits <= 8 else torch.int16, device=DEVICE) for _ in range(2))
    values, expected = (torch.empty(CHUNK, device=DEVICE) for _ in range(2))
    differences = 0
    for start, x in patterns(every):
        a.fill_(77)
        lost = triton.encode_into(a, x, Encoding(fmt.grid, rule, fmt.coding), (seed, 3, start))
        also_lost = reference.encode_into(b, x, Encoding(fmt.grid, rule, fmt.coding), (seed, 3, start))
        triton.decode_into(values, a, fmt.grid, fmt.coding)
        reference.decode_into(expected, b, fmt.grid, fmt.coding)
        differences += count_differences(a, b) + count_differences(values, expected) + (bool(lost) != bool(also_lost))
    return differences


def table(fmt: Format, every: int = 1) -> Iterator[tuple[str, int]]:
    """The comparisons for a format, and the number of results that differ."""
    for overflow in ("saturate", "saturate_symmetric", "nonfinite"):
        for name, rounding in ROUNDINGS.items():
            yield f"{name}, {overflow}", quantized_differently(fmt, rounding, overflow, torch.float32, every)
    if holds(torch.bfloat16, fmt):
        for name in ("nearest", "stochastic", "6 bits"):
            yield f"{name}, saturate, into bfloat16", quantized_differently(fmt, ROUNDINGS[name], "saturate", torch.bfloat16, every)
    for name in ("nearest", "stochastic"):
        yield f"{name}, saturate, encoded and decoded", encoded_differently(fmt, ROUNDINGS[name], "saturate", every)


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_every_float32(fmt: Format) -> None:
    found = dict(table(fmt))
    assert len(found) >= 22
    assert {name: differences for name, differences in found.items() if differences} == {}


def test_every_pattern_is_there() -> None:
    # Each chunk starts where the one before ended, with all of its patterns: 2**32 different ones.
    expected = -(2**31)
    for start, x in patterns():
        bits = raw(x)
        assert start - 2**31 == expected
        assert bits[0].item() == expected
        assert bits[-1].item() == expected + CHUNK - 1
        assert bool((bits[1:] > bits[:-1]).all())
        expected += CHUNK
    assert expected == 2**31


def main(arguments: list[str] | None = None) -> int:
    """Print the table of differences for some formats; return the total."""
    parser = argparse.ArgumentParser(description="Compares the two implementations on every float32 number.")
    parser.add_argument("formats", nargs="*", help="names of formats; the test's own unless given")
    parser.add_argument("--every", type=int, default=1, help="take one chunk of so many, to see how long all of them would take")
    options: Any = parser.parse_args(arguments)
    chosen = [qsim.format(name) for name in options.formats] or FORMATS
    total, begun = 0, time.perf_counter()
    with large_chunks():
        for fmt in chosen:
            print(f"{fmt!r}", flush=True)
            last = time.perf_counter()
            for name, differences in table(fmt, options.every):
                now = time.perf_counter()
                print(f"  {name:<45} {differences:>10} differ  {now - last:6.1f} s", flush=True)
                last, total = now, total + differences
    share = "2**32 numbers" if options.every == 1 else f"every chunk of {options.every} of the 2**32 numbers"
    print(f"{total} differences in {len(chosen)} formats, for {share}, in {time.perf_counter() - begun:.0f} s")
    return total


if __name__ == "__main__":
    raise SystemExit(main() > 0)
