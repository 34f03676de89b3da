"""The inputs at which roundings go wrong: midpoints and their neighbours, borders of binades, overflow, specials, NaN payloads."""

from __future__ import annotations

import numpy as np
import torch

from qsim.formats import Format
from support.oracle import bottom, gap, top
from support.oracle_arrays import BITS, Floats, Integers, magnitudes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def width(dtype: torch.dtype) -> int:
    """Bits of a dtype."""
    return torch.finfo(dtype).bits


def code_dtype(fmt: Format) -> torch.dtype:
    """The dtype of a format's codes."""
    return torch.uint8 if fmt.bits <= 8 else torch.int16 if fmt.bits <= 16 else torch.int32


def from_bits(patterns: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a dtype from bit patterns, given as non-negative integers."""
    half = 1 << (width(dtype) - 1)
    signed = [pattern - 2 * half if pattern >= half else pattern for pattern in patterns]
    return torch.tensor(signed, dtype=BITS[dtype]).view(dtype)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 2**16 numbers of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def random_patterns(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Random bit patterns: every exponent is as likely as any other, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (count, 2), generator=generator)
    return (words[:, 0] * 2**32 + words[:, 1]).to(BITS[dtype]).view(dtype)


def nans(dtype: torch.dtype) -> torch.Tensor:
    """One NaN of every class: quiet and signalling, with the smallest, a middle and the largest payload, of both signs."""
    bits, mantissa = width(dtype), round(-np.log2(torch.finfo(dtype).eps))
    sign, infinity, quiet = 1 << (bits - 1), (1 << (bits - 1)) - (1 << mantissa), 1 << (mantissa - 1)
    payloads = [1, quiet >> 1, quiet - 1, quiet, quiet + 1, quiet + (quiet >> 1), 2 * quiet - 1]
    return from_bits([infinity + payload for payload in payloads] + [sign + infinity + payload for payload in payloads], dtype)


def specials(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, subnormals, the ends of the dtype, infinities and NaN, of both signs."""
    facts = torch.finfo(dtype)
    subnormal = facts.smallest_normal * facts.eps
    numbers = [
        0.0,
        subnormal,
        2 * subnormal,
        3 * subnormal,
        facts.smallest_normal - subnormal,
        facts.smallest_normal,
        1.0,
        facts.max,
        torch.inf,
    ]
    positive = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    return torch.cat([positive, -positive, nans(dtype)])


def some_codes(fmt: Format, count: int, seed: int = 0) -> Integers:
    """Unsigned codes of a format: all of them if there are at most `count`, else both ends, borders of binades and random ones.

    One code beyond the largest value is included, for the overflow boundary.
    """
    end = max(bottom(fmt), top(fmt)) + 1
    if end < count:
        return np.arange(end + 1)
    ends = np.concatenate([np.arange(8), end - np.arange(8), gap(fmt) + np.arange(3)])
    borders = (2 ** np.arange(end.bit_length()))[:, None] + np.arange(-1, 2)
    drawn = np.random.default_rng(seed).integers(0, end, count)
    codes = np.concatenate([ends, borders.ravel(), drawn])
    return np.unique(np.clip(codes, 0, end))


def corners(fmt: Format, count: int = 256) -> Floats:
    """Values and midpoints of neighbouring values, not negative, in float64, where both are exact."""
    codes = some_codes(fmt, count)
    codes = codes[(codes == 0) | (codes > gap(fmt))]
    low = magnitudes(fmt, codes)
    following = magnitudes(fmt, np.where(codes == 0, gap(fmt), codes) + 1)
    return np.unique(np.concatenate([low, (low + following) / 2, following]))


def around(points: Floats, dtype: torch.dtype) -> torch.Tensor:
    """Points in a dtype, their two neighbours in it, and all of these negated."""
    kind = BITS[dtype]
    rounded = torch.from_numpy(points).to(dtype)
    rounded = rounded[rounded.isfinite() & (rounded > 0)]
    pattern = rounded.view(kind)
    positive = torch.cat([pattern - 1, pattern, pattern + 1]).view(dtype)
    return torch.cat([positive, -positive])


def edges(fmt: Format, dtype: torch.dtype, count: int = 256) -> torch.Tensor:
    """All inputs that are difficult when rounding to a format from a dtype."""
    return torch.cat([around(corners(fmt, count), dtype), specials(dtype), random_patterns(dtype, 64, seed=fmt.bits)])


def double_rounding(fmt: Format, count: int = 256) -> torch.Tensor:
    """float64 numbers just next to midpoints, which a detour over float32 would move onto the midpoints: for at most 22 mantissa bits."""
    codes = some_codes(fmt, count)
    codes = codes[codes > gap(fmt)]
    middle = (magnitudes(fmt, codes) + magnitudes(fmt, codes + 1)) / 2
    beside = torch.from_numpy(np.concatenate([np.nextafter(middle, 0), np.nextafter(middle, np.inf)]))
    beside = beside[(beside > 2.0**-125) & (beside < 2.0**127)]
    return torch.cat([beside, -beside])


def spread_patterns(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of a dtype whose bits are spread evenly, by a multiplication that no library can change: every exponent, NaN, infinities."""
    words = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    bits = width(dtype)
    return torch.from_numpy((words >> np.uint64(64 - bits)).astype(f"uint{bits}").view(f"int{bits}")).view(dtype)


def ordinary(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Finite numbers of ordinary sizes and both signs, with some zeros and outliers."""
    words = spread_patterns(int(np.prod(shape)), torch.float32, seed + 1).view(torch.int32)
    exponent, sign = words >> 8 & 15, words & -(2**31)
    bits = (words & 0x7FFFFF) | (exponent + 118 << 23) | sign
    return torch.where(words & 63 == 0, 0, bits).view(torch.float32).to(dtype).view(shape)
