"""Stochastic rounding of bfloat16 values, two elements per instruction: an override of rounding one by one, in NVIDIA's PTX.

A power of two that is 2**7 times the spacing of a grid at a value has the spacing itself as its last place in bfloat16, and 2**-16 of it in
float32. So a float32 whose upper half is that power, and whose lower half are the first 16 random bits, exceeds the power by as many parts
of a step. The value is added to it, toward zero. The upper half of the sum less the power, in bfloat16 and again two at a time, is the
rounded value, be it normal or subnormal.

Where the lower half of a sum is all ones, what follows it may carry: the rest of the value and the last 16 random bits. As in `undecided`,
the threads of a warp draw these only then.

One by one, the integer pipe limits such kernels, and few warps fit: on an H100, blocks of MXFP8 along the first dimension and tiles of
128 × 128 reach 70 and 59 % of a copy's speed. In pairs both reach 99 %; on an H200, whose copies are faster, 93 and 83, and codes in E4M3
reach 85.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import triton
import triton.language as tl

from qsim_kernels.triton.device.undecided import philox_text

#: Pairs that share a Philox block.
PAIRS = 4
#: The operands of every text: the kind of their registers.
COMMON = {"block": "l", "seed": "l", "stream": "l", "lift": "r", "lowest": "r"}

#: The registers of operands by name.
Registers = dict[str, list[str]]


def registers(results: int, operands: dict[str, tuple[str, int]]) -> tuple[Registers, str]:
    """The registers of operands, behind those of results, and the constraints of all, given the kind and the number of each operand's."""
    named, first = {}, results
    for name, (_, number) in operands.items():
        named[name] = [f"${i}" for i in range(first, first + number)]
        first += number
    return named, ",".join(["=&r"] * results + [kind for kind, number in operands.values() for _ in range(number)])


class Ends(NamedTuple):
    """The ends of a text, which differ between roundings. Each makes PTX from a pair's number, a half of it if any, and the operands.

    Attributes:
        element: Puts a clamped element with any sign into `value`, a float32; `pair` and the pair's number is free.
        powers: Puts elements, cut to bfloat16, into `power` and the pair's number, given each in `sum` and its own number.
        written: Writes the result, given the rounded magnitudes as a pair in `rounded`.
        repaired: Does what `element` does, with something else in place of NaN, if a NaN is not to be rounded like other values. Its sum's
            lower half is all ones, so that no time is lost where there is none.
    """

    element: Callable[[int, int, Registers], list[str]]
    powers: Callable[[int, Registers], list[str]]
    written: Callable[[int, Registers], list[str]]
    repaired: Callable[[int, int, Registers], list[str]] | None = None


def split(pair: str, half: int) -> list[str]:
    """PTX for one bfloat16 of a pair as `value`."""
    return [f"and.b32 bits, {pair}, 0xFFFF0000;" if half else f"shl.b32 bits, {pair}, 16;", "mov.b32 value, bits;"]


def pair_as_powers(i: int, of: Registers) -> list[str]:
    """PTX for a clamped pair as that whose powers are found; see `Ends`."""
    return [f"mov.b32 power{i}, pair{i};"]


def _raised(i: int, half: int) -> list[str]:
    """PTX for a power and the first random bits behind it, as `raised`."""
    return [f"prmt.b32 bits, first{i}, power{i}, {'0x7632' if half else '0x5410'};", "mov.b32 raised, bits;"]


def steps_of_pair(i: int, of: Registers) -> list[str]:
    """PTX that takes magnitudes in `power` and the pair's number to 2**7 times the spacing, the same below the smallest normal value."""
    return [
        f"and.b32 power{i}, power{i}, 0x7F807F80;",
        f"add.u16x2 power{i}, power{i}, {of['lift'][0]};",
        f"max.u16x2 power{i}, power{i}, {of['lowest'][0]};",
    ]


def _sums(i: int, ends: Ends, of: Registers) -> list[str]:
    """PTX for the sums of a pair."""
    lines = []
    for half in (0, 1):
        lines += [*ends.element(i, half, of), f"mov.b32 sum{2 * i + half}, value;"]
    lines += [*ends.powers(i, of), *steps_of_pair(i, of)]
    for half in (0, 1):
        place = 2 * i + half
        lines += [f"mov.b32 value, sum{place};", "abs.f32 value, value;", *_raised(i, half)]
        lines += ["add.rz.f32 value, raised, value;", f"mov.b32 sum{place}, value;"]
    return lines


def _carried(i: int, half: int, ends: Ends, of: Registers) -> list[str]:
    """PTX that adds to a sum what the rest of the magnitude and the last 16 random bits carry."""
    place = 2 * i + half
    return [
        *ends.element(i, half, of),
        "abs.f32 value, value;",
        *_raised(i, half),
        f"mov.b32 total, sum{place};",
        "sub.f32 total, total, raised;",
        "sub.f32 value, value, total;",
        # In units of 2**-32 of the spacing: times 2**39, divided by the power.
        "and.b32 bits, bits, 0xFFFF0000;",
        "sub.u32 bits, 0x7F000000, bits;",
        "mov.b32 raised, bits;",
        "mul.f32 value, value, raised;",
        "mul.f32 value, value, 0f53000000;",
        "cvt.rzi.u32.f32 bits, value;",
        f"prmt.b32 random, last{i}, 0, {'0x4432' if half else '0x4410'};",
        "add.u32 bits, bits, random;",
        "shr.u32 bits, bits, 16;",
        f"add.u32 sum{place}, sum{place}, bits;",
    ]


def _exchanged(words: str, distance: int) -> list[str]:
    """PTX that exchanges words with the lane at a distance: each two words and each two lanes are a matrix, which is transposed."""
    lines = [f"and.b32 bits, lane, {distance};", "setp.ne.u32 again, bits, 0;"]
    for first in range(PAIRS):
        if not first & distance:
            low, high = f"{words}{first}", f"{words}{first + distance}"
            lines += [f"selp.b32 bits, {low}, {high}, again;", f"shfl.sync.bfly.b32 bits, bits, {distance}, 31, 0xFFFFFFFF;"]
            lines += [f"selp.b32 {low}, bits, {low}, again;", f"selp.b32 {high}, {high}, bits, again;"]
    return lines


def _block_of_words(name: str, block: str, upper: str, of: Registers) -> list[str]:
    return philox_text(name, block, of["seed"][0], of["stream"][0], upper, unrolled=upper == "0")


#: Makes PTX for the random words of pairs, in registers of a name, from what is set in the Philox blocks' upper words, and the operands.
Drawing = Callable[[str, str, Registers], list[str]]


def in_one_block(words: str, upper: str, of: Registers) -> list[str]:
    """PTX for the random words of four pairs that are a Philox block."""
    return _block_of_words(words, of["block"][0], upper, of)


def in_quads(words: str, upper: str, of: Registers) -> list[str]:
    """PTX for the random words of four pairs in four Philox blocks, each of which four neighbouring lanes share.

    `block` is that of the first pair in the first lane, of the second pair in the second, and so on.
    """
    return ["mov.u32 lane, %laneid;", *in_one_block(words, upper, of), *_exchanged(words, 1), *_exchanged(words, 2)]


def in_columns(words: str, upper: str, of: Registers) -> list[str]:
    """PTX for the random words of eight pairs, whose first elements are a Philox block, and whose second ones are another."""
    lines = [f".reg .b32 {words}{i};" for i in range(2 * PAIRS)]
    for half, block in zip(("left", "right"), of["block"], strict=True):
        lines += _block_of_words(f"{words}_{half}", block, upper, of)
    for i in range(2 * PAIRS):
        lines.append(f"prmt.b32 {words}{i}, {words}_left{i // 2}, {words}_right{i // 2}, {'0x7632' if i % 2 else '0x5410'};")
    return lines


def text(ends: Ends, of: Registers, drawn: Drawing = in_one_block, count: int = PAIRS) -> str:
    """PTX for some pairs.

    Args:
        ends: The ends of the text.
        of: The registers of operands.
        drawn: Draws the random words.
        count: The number of pairs for which it draws.
    """
    pairs = range(count)
    lines = [
        ".reg .pred decided, again;",
        ".reg .b32 bits, random, undecided, rounded, lane, key0, key1, round, low0, high0, low1, high1;",
        ".reg .b64 product0, product1;",
        ".reg .f32 value, raised, total;",
        *(f".reg .b32 pair{i}, power{i};" for i in pairs),
        *(f".reg .b32 sum{2 * i}, sum{2 * i + 1};" for i in pairs),
        *drawn("first", "0", of),
    ]
    for i in pairs:
        lines += _sums(i, ends, of)
    lines += [
        # The largest of lower halves; upper halves are compared, too, for nothing.
        "max.u16x2 undecided, sum0, sum1;",
        *(f"max.u16x2 undecided, undecided, sum{i};" for i in range(2, 2 * count)),
        "shl.b32 undecided, undecided, 16;",
        "setp.lt.u32 decided, undecided, 0xFFFF0000;",
        # A warp does not diverge: a one more carries in no other sum.
        "vote.sync.all.pred decided, decided, 0xFFFFFFFF;",
        "@decided bra.uni DONE;",
        *drawn("last", "0x80000000", of),
    ]
    if ends.repaired is not None:
        ends = ends._replace(element=ends.repaired)
        for i in pairs:
            lines += _sums(i, ends, of)
    for i in pairs:
        lines += _carried(i, 0, ends, of) + _carried(i, 1, ends, of)
    lines.append("DONE:")
    for i in pairs:
        lines += [f"prmt.b32 rounded, sum{2 * i}, sum{2 * i + 1}, 0x7632;", f"sub.bf16x2 rounded, rounded, power{i};"]
        lines += ends.written(i, of)
    return "{" + "\n".join([*lines, "}"])


@triton.jit
def in_both_halves(pattern):
    """Sixteen bits twice."""
    return pattern | pattern << 16


@triton.jit
def larger_pair(a, b):
    """The larger magnitude of each two bfloat16 values, with any sign; NaN if one is. They are single, or pairs in an integer each."""
    TEXT: tl.constexpr = "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;"
    return tl.inline_asm_elementwise(TEXT, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2 if a.dtype == tl.bfloat16 else 1)
