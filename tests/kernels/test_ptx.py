"""The executor of PTX that tests of texts use: instructions against exact arithmetic, and what a GPU leaves undefined is an error."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from support.forced_words import counter_of
from support.philox_oracle import block as philox_block
from support.ptx import LANES, UndefinedError, execute
from support.ptx_words import MEANINGS, numbers

RNG = np.random.default_rng(0)
#: Patterns of bfloat16: zeros, the smallest numbers, one, the largest ones, infinities and NaN, and others.
HALVES = np.array([0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF], np.uint32)


def singles(count: int) -> Any:
    """Patterns of float32 whose sums and products need rounding: many have exponents near each other."""
    bits = RNG.integers(0, 2**32, count, dtype=np.uint32)
    near = bits & np.uint32(0x80FFFFFF) | np.uint32(0x3C000000)
    special = np.array([0, 1 << 31, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x3F800000, 0xBF800000], np.uint32)
    finite = np.where((bits & 0x7F800000) == 0x7F800000, special[0], bits)
    return np.concatenate([near, finite, np.resize(special, 64)])


def exact(bits: Any) -> list[Fraction]:
    return [Fraction(float(x)) for x in numbers(bits)]


def is_rounded(x: Fraction, bits: int, direction: str, mantissa: int = 23) -> bool:
    """Whether a float32 or, with 7 bits of mantissa, a bfloat16 pattern is a finite number rounded in a direction."""
    value = float(np.array(bits, np.uint32).view(np.float32))
    step = 1 << 23 - mantissa
    if math.isinf(value):
        return direction == "rn" or (direction == "rp") == (value > 0)
    pattern = bits & 0x7FFFFFFF
    low, high = (float(np.array(each, np.uint32).view(np.float32)) for each in (max(pattern - step, 0), pattern + step))
    size, magnitude = abs(x), Fraction(abs(value))
    is_even = (bits >> 23 - mantissa) % 2 == 0
    # As if exponents were unbounded.
    below, above = Fraction(low), Fraction(high) if math.isfinite(high) else Fraction(2) ** 128
    if direction == "rn":
        least, most = (magnitude + below) / 2 if magnitude else -1, (magnitude + above) / 2
        return least < size < most or (is_even and size in (least, most))
    if direction == "rz" or (direction == "rm") == (x > 0):
        return magnitude <= size and (size < above or math.isinf(high))
    return size <= magnitude and (not magnitude or below < size)


@pytest.mark.parametrize("direction", ["rn", "rz", "rm", "rp"])
def test_fused_products_are_rounded_once(direction: str) -> None:
    a, b, c = (RNG.permutation(singles(200)) for _ in range(3))
    results = MEANINGS[f"fma.{direction}.f32"](a, b, c)
    for x, y, z, result in zip(exact(a), exact(b), exact(c), results.tolist(), strict=True):
        total = x * y + z
        assert is_rounded(total, result, direction), (x, y, z, hex(result))


def test_sums_toward_zero() -> None:
    a, b = (RNG.permutation(singles(400)) for _ in range(2))
    for x, y, result in zip(exact(a), exact(b), MEANINGS["add.rz.f32"](a, b).tolist(), strict=True):
        assert is_rounded(x + y, result, "rz"), (x, y, hex(result))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma.rn"])
def test_pairs_are_rounded_once(name: str) -> None:
    words = [RNG.permutation(singles(400)) & np.uint32(0x7FFF7FFF) for _ in range(3)]
    words = [np.where((word & 0x7F80) == 0x7F80, word & np.uint32(0xFFFF0000), word) for word in words]
    results = MEANINGS[f"{name}.bf16x2"](*words[: 3 if "fma" in name else 2])
    for shift in (0, 16):
        halves = [exact((word >> np.uint32(shift) & np.uint32(0xFFFF)) << np.uint32(16)) for word in words]
        for x, y, z, result in zip(*halves, (results >> np.uint32(shift) & 0xFFFF).tolist(), strict=True):
            total = {"add": x + y, "sub": x - y, "mul": x * y, "fma.rn": x * y + z}[name]
            assert is_rounded(total, result << 16, "rn", 7), (x, y, z, hex(result))


def test_pairs_with_special_values() -> None:
    a, b = (
        x.reshape(-1).astype(np.uint32)
        for x in np.meshgrid(np.concatenate([HALVES, HALVES | 0x8000]), np.concatenate([HALVES, HALVES | 0x8000]))
    )
    x, y = (half.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32) for half in (a, b))
    pair = MEANINGS["add.bf16x2"](a | a << np.uint32(16), b | b << np.uint32(16))
    with np.errstate(all="ignore"):
        total = (x + y).astype(ml_dtypes.bfloat16).view(np.uint16)
        expected = np.where(np.isnan(x + y), 0x7FFF, total)
    assert (pair & 0xFFFF == expected).all()
    assert (pair >> 16 == expected).all()
    is_nan = np.isnan(x) | np.isnan(y)
    sign = (a ^ b) & 0x8000
    for name, larger in (("min", False), ("max", True)):
        chosen = MEANINGS[f"{name}.NaN.xorsign.abs.bf16x2"](a, b) & 0xFFFF
        magnitudes = (np.maximum if larger else np.minimum)(a & 0x7FFF, b & 0x7FFF)
        assert (chosen == np.where(is_nan, 0x7FFF, magnitudes | sign)).all()
    number = MEANINGS["min.bf16x2"](a, b) & 0xFFFF
    assert ((number == 0x7FFF) == (np.isnan(x) & np.isnan(y))).all()


def test_bytes_logic_and_products_of_halves() -> None:
    a, b, c = (RNG.integers(0, 2**32, 100, dtype=np.uint32) for _ in range(3))
    low, high = (np.stack([x >> np.uint32(8 * i) & 0xFF for i in range(4)], -1) for x in (a, b))
    chosen = np.concatenate([low, high], -1)[:, [2, 3, 6, 7]]
    assert (MEANINGS["prmt.b32"](a, b, np.uint32(0x7632)) == (chosen << np.arange(0, 32, 8)).sum(-1)).all()
    assert (MEANINGS["lop3.b32"](a, b, c, np.uint32(0xF8)) == (a | (b & c))).all()
    assert (MEANINGS["lop3.b32"](a, b, c, np.uint32(0xCA)) == ((a & b) | (~a & c))).all()
    assert (MEANINGS["lop3.b32"](a, b, c, np.uint32(0x96)) == a ^ b ^ c).all()
    assert (MEANINGS["dp2a.lo.u32.u32"](a, np.uint32(0x100), c) == c + (a >> np.uint32(16))).all()


def lanes(warps: int = 2) -> Any:
    return RNG.integers(0, 2**32, (warps, LANES), dtype=np.uint32)


def test_lanes_that_took_different_branches_meet_again() -> None:
    """A loop that each lane leaves after a number of steps of its own, and then an exchange with a neighbour."""
    text = """{
        .reg .pred again; .reg .b32 count, lane; .reg .b64 both;
        mov.u32 lane, %laneid; mov.b32 count, 0;
        NEXT: add.u32 count, count, 3;
        setp.lt.u32 again, count, lane;
        @again bra NEXT;
        shfl.sync.bfly.b32 $0, count, 1, 31, 0xFFFFFFFF;
        mul.wide.u32 both, count, $1; cvt.u32.u64 $0, both; shfl.sync.bfly.b32 $0, $0, 1, 31, 0xFFFFFFFF; }"""
    x = lanes()
    (result,) = execute(text, "=&r,r", [x])
    steps = np.maximum(-(-np.arange(LANES) // 3), 1).astype(np.uint32) * np.uint32(3)
    assert (result == (steps * x)[:, np.arange(LANES) ^ 1]).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{ .reg .pred odd; and.b32 $0, $1, 1; setp.eq.u32 odd, $0, 0; @odd bra.uni END; mov.b32 $0, $1; END: }",
            "disagree about a branch",
        ),
        (
            "{ .reg .pred odd; setp.eq.u32 odd, $1, 0; @odd bra END; shfl.sync.bfly.b32 $0, $1, 1, 31, 0xFFFFFFFF; END: }",
            "only some lanes",
        ),
        (
            "{ .reg .pred odd, all; setp.eq.u32 odd, $1, 0; @odd vote.sync.all.pred all, odd, 0xFFFFFFFF; mov.b32 $0, $1; }",
            "only some lanes",
        ),
        ("{ .reg .b32 bits; add.u32 $0, bits, $1; }", "bits is read before it is written"),
    ],
)
def test_what_a_gpu_does_not_define(text: str, message: str) -> None:
    x = lanes() & np.uint32(1)
    with pytest.raises(UndefinedError, match=message):
        execute(text, "=&r,r", [x])


def test_results_may_be_in_the_registers_of_operands() -> None:
    text = "{ not.b32 $0, $1; add.u32 $0, $0, $2; }"
    x, y = lanes(), lanes()
    (result,) = execute(text, "=&r,r,r", [x, y])
    assert (result == ~x + y).all()
    with pytest.raises(UndefinedError, match=r"\$2 is read after a result that may be in its register has been written"):
        execute(text, "=r,r,r", [x, y])


def test_registers_have_kinds() -> None:
    with pytest.raises(AssertionError, match="other is not declared"):
        execute("{ mov.b32 other, $1; }", "=r,r", [lanes()])
    with pytest.raises(AssertionError, match="wide is uint64, not uint32"):
        execute("{ .reg .b64 wide; mov.b32 wide, $1; }", "=r,r", [lanes()])
    with pytest.raises(AssertionError, match="3 constraints for 1 results and 1 operands"):
        execute("{ mov.b32 $0, $1; }", "=r,r,r", [lanes()])


def test_philox_is_computed_backwards() -> None:
    key = [0x243F6A88, 0x85A308D3]
    words = [0xFFFFFFFF, 0x12345678, 0, 0xFFFEFFFF]
    assert philox_block(tuple(counter_of(words, key)), tuple(key)) == tuple(words)
