"""Stochastic rounding that draws the last 16 of 32 random bits only where the first 16 leave a result undecided.

That is one value in 65536: the first bits of its position between its two neighbours and the first random bits add up to just less than a
step. A thread that holds such a value rounds again, with all bits. Values with at most 11 significant bits can be undecided only below
the smallest value of a grid: above it, their positions have at most 16 bits. They are rounded again by fewer instructions, with fewer
operands: kernels that move only two bytes per element have no registers to spare.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.arithmetic.philox import FACTOR_0, FACTOR_2, GROWTH_0, GROWTH_1
from qsim_kernels.triton.device.directed import TOWARD_ZERO, multiply_add

#: Elements of a Philox block, and of one call of the PTX below.
RUN = 8
_OPERANDS = ("out", "rounded", "x", "open", "place", "block", "seed", "stream", "least", "scale")
_OPERANDS_OF_MANY_BITS = (*_OPERANDS, "low", "largest")


def philox_text(name: str, block: str, seed: str, stream: str, upper: str, *, unrolled: bool = False) -> list[str]:
    """PTX for the four words of a Philox block, in the registers `name`0 to `name`3; `upper` is set in the block's upper word.

    By default it is a short loop, for what runs rarely: unrolled instructions would get in the way of others.
    """
    c0, c1, c2, c3 = (f"{name}{i}" for i in range(4))
    start = [
        f".reg .b32 {c0}, {c1}, {c2}, {c3};",
        f"mov.b64 {{{c0}, {c1}}}, {block};",
        f"or.b32 {c1}, {c1}, {upper};",
        f"mov.b64 {{{c2}, {c3}}}, {stream};",
        f"mov.b64 {{key0, key1}}, {seed};",
    ]
    step = [
        f"mul.wide.u32 product0, {c0}, {FACTOR_0};",
        f"mul.wide.u32 product1, {c2}, {FACTOR_2};",
        "mov.b64 {low0, high0}, product0;",
        "mov.b64 {low1, high1}, product1;",
        f"xor.b32 {c0}, high1, {c1};",
        f"xor.b32 {c0}, {c0}, key0;",
        f"xor.b32 {c2}, high0, {c3};",
        f"xor.b32 {c2}, {c2}, key1;",
        f"mov.b32 {c1}, low1;",
        f"mov.b32 {c3}, low0;",
        f"add.u32 key0, key0, {GROWTH_0};",
        f"add.u32 key1, key1, {GROWTH_1};",
    ]
    if unrolled:
        return start + step * 10
    again = ["add.u32 round, round, 1;", "setp.lt.u32 again, round, 10;", f"@again bra.uni {name}_ROUND;"]
    return [*start, "mov.b32 round, 0;", f'{name}_ROUND: .pragma "nounroll";', *step, *again]


def half_word(result: str, name: str, place: str) -> list[str]:
    """PTX for the half word of the element at a position, 0 to 7, of a Philox block."""
    return [
        f"setp.gt.u32 second, {place}, 1;",
        f"selp.b32 {result}, {name}1, {name}0, second;",
        f"setp.gt.u32 second, {place}, 3;",
        f"selp.b32 {result}, {name}2, {result}, second;",
        f"setp.gt.u32 second, {place}, 5;",
        f"selp.b32 {result}, {name}3, {result}, second;",
        f"and.b32 odd, {place}, 1;",
        "shl.b32 odd, odd, 4;",
        f"shr.u32 {result}, {result}, odd;",
        f"and.b32 {result}, {result}, 0xFFFF;",
    ]


def _round_again(i: int, of: dict[str, list[str]]) -> list[str]:
    """PTX that rounds one value with all 32 bits, if it can be undecided and is in the current Philox block."""
    block, place = of["block"][i], of["place"][i]
    return [
        f"setp.eq.u64 here, {block}, current;",
        f"@here and.b32 left, left, {~(1 << i) & 0xFF};",
        *half_word("first", "first", place),
        *half_word("last", "last", place),
        "shl.b32 random, first, 16;",
        "or.b32 random, random, last;",
        # Up if position + random carries.
        "not.b32 random, random;",
        *(_above_its_neighbour(i, of) if "low" in of else _below_the_smallest(i, of)),
    ]


def _below_the_smallest(i: int, of: dict[str, list[str]]) -> list[str]:
    """PTX that rounds a magnitude to zero or to the grid's smallest value, if it lies between them."""
    out, x, least, scale = (of[name][i] for name in ("out", "x", "least", "scale"))
    return [
        f"abs.f32 magnitude, {x};",
        f"setp.lt.and.f32 here, magnitude, {least}, here;",
        f"mul.f32 magnitude, magnitude, {scale};",
        "cvt.rzi.u32.f32 position, magnitude;",
        "setp.gt.u32 up, position, random;",
        f"selp.f32 magnitude, {least}, 0f00000000, up;",
        f"@here mov.f32 {out}, magnitude;",
    ]


def _above_its_neighbour(i: int, of: dict[str, list[str]]) -> list[str]:
    """PTX that adds a step to a magnitude's lower neighbour, the result so far, if the magnitude is undecided and goes up."""
    out, x, distance, least, scale, low, largest = (of[name][i] for name in ("out", "x", "open", "least", "scale", "low", "largest"))
    return [
        f"setp.eq.and.u32 here, {distance}, 0, here;",
        # The magnitude's binade, in units of the smallest value's.
        f"and.b32 binade, {x}, 0x7FFFFFFF;",
        f"min.u32 binade, binade, {largest};",
        "mov.b32 magnitude, binade;",
        "and.b32 binade, binade, 0x7F800000;",
        f"max.u32 binade, binade, {low};",
        f"sub.u32 binade, binade, {low};",
        f"mov.b32 step, {scale};",
        "sub.u32 step, step, binade;",
        "mov.b32 per_step, step;",
        f"mov.b32 step, {least};",
        "add.u32 step, step, binade;",
        "mov.b32 spacing, step;",
        f"sub.f32 magnitude, magnitude, {out};",
        "mul.f32 magnitude, magnitude, per_step;",
        "cvt.rzi.u32.f32 position, magnitude;",
        "setp.gt.and.u32 up, position, random, here;",
        f"@up add.f32 {out}, {out}, spacing;",
    ]


def _first_left(blocks: list[str]) -> list[str]:
    """PTX for the Philox block of the first remaining element."""
    lines = [f"mov.b64 current, {blocks[-1]};"]
    for i, block in reversed(list(enumerate(blocks[:-1]))):
        lines += [f"and.b32 odd, left, {1 << i};", "setp.ne.u32 here, odd, 0;", f"selp.b64 current, {block}, current, here;"]
    return lines


def _settle_text(operands: tuple[str, ...]) -> str:
    """PTX for eight elements with these operands: where the first 16 bits leave one undecided, it draws all bits and rounds again.

    Any eight elements are allowed. In fast kernels they share a Philox block: the compiler then knows that one pass of the loop is enough,
    and removes the rest.
    """
    of = {name: [f"${RUN * number + i}" for i in range(RUN)] for number, name in enumerate(operands)}
    seed, stream = of["seed"][0], of["stream"][0]
    lines = [
        ".reg .pred decided, again, second, here, up;",
        ".reg .b32 nearest, left, key0, key1, round, low0, high0, low1, high1, odd, first, last, random, position, binade, step;",
        ".reg .b64 current, product0, product1;",
        ".reg .f32 magnitude, per_step, spacing;",
        *(f"mov.f32 {out}, {rounded};" for out, rounded in zip(of["out"], of["rounded"], strict=True)),
        f"mov.b32 nearest, {of['open'][0]};",
        *(f"min.u32 nearest, nearest, {distance};" for distance in of["open"][1:]),
        "setp.ne.u32 decided, nearest, 0;",
        # A warp does not diverge: its other threads round again to the same results.
        "vote.sync.all.pred decided, decided, 0xFFFFFFFF;",
        "@decided bra.uni DONE;",
        "mov.b32 left, 0xFF;",
        "NEXT:",
        *_first_left(of["block"]),
        *philox_text("first", "current", seed, stream, "0"),
        *philox_text("last", "current", seed, stream, "0x80000000"),
    ]
    for i in range(RUN):
        lines += _round_again(i, of)
    lines += ["setp.ne.u32 again, left, 0;", "@again bra NEXT;", "DONE:"]
    # The sign comes last, so that an element's value and its sign need not be kept separately.
    lines += [f"lop3.b32 {out}, {out}, {x}, 0x80000000, 0xF8;" for out, x in zip(of["out"], of["x"], strict=True)]
    return "{" + "\n".join([*lines, "}"])


#: The exponent fields of 2**32 and 1 together, as int32: without those of a power of two, they are those of 2**32 divided by it.
SCALED_BY: tl.constexpr = tl.constexpr(((127 + 32 + 127) << 23) - (1 << 32))
SETTLE: tl.constexpr = tl.constexpr(_settle_text(_OPERANDS))
SETTLE_MANY_BITS: tl.constexpr = tl.constexpr(_settle_text(_OPERANDS_OF_MANY_BITS))
CONSTRAINTS: tl.constexpr = tl.constexpr(",".join(["=&f"] * 8 + ["f"] * 16 + ["r"] * 16 + ["l"] * 24 + ["f"] * 16))
CONSTRAINTS_OF_MANY_BITS: tl.constexpr = tl.constexpr(",".join([CONSTRAINTS.value] + ["r"] * 16))


@triton.jit
def add_half_word(bits, words, place):
    """Add the half words of elements at the given positions of a Philox block to integers: one instruction, which also selects the half."""
    TEXT: tl.constexpr = "dp2a.lo.u32.u32 $0, $1, $2, $3;"
    which = tl.where(place & 1 == 0, 0x1, 0x100)
    return tl.inline_asm_elementwise(TEXT, "=r,r,r,r", [words, which, bits], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def round_later(x, y, drawn, grid, FEW_BITS: tl.constexpr, largest):
    """Round float32 values onto a grid with evenly spaced values around zero, drawing the last 16 random bits only where they matter.

    Args:
        x: Values. Fastest if a thread holds eight neighbours of one Philox block.
        y: Their magnitudes, clamped. NaN is the one with all bits set.
        drawn: `Words`.
        grid: `GridNumbers` of a grid with at most 6 significant bits, or of evenly spaced values, 2**7 at most.
        FEW_BITS: Whether values have at most 11 significant bits.
        largest: The largest magnitude in `y`.
    """
    # Near 2**7 times the spacing, or 1.5 times that, float32's spacing is 2**-16 of the grid's. NaN stays NaN.
    power = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7FC00000, grid.low << 23).to(tl.float32, bitcast=True)
    lift = ((grid.shift + 111) << 23).to(tl.float32, bitcast=True)
    total = add_half_word(multiply_add(power, lift, y, TOWARD_ZERO).to(tl.int32, bitcast=True), drawn.words, drawn.place)
    rounded = tl.fma(power, -lift, (total & -0x10000).to(tl.float32, bitcast=True))
    # The first bits leave a value undecided if 2**-16 more of the spacing would reach its upper neighbour.
    least = grid.least.to(tl.float32, bitcast=True)
    # 2**32 divided by the smallest value.
    scale = (SCALED_BY - grid.least).to(tl.float32, bitcast=True)
    if FEW_BITS:
        distance = total - (((grid.low + grid.shift - 16) << 23) + 0xFFFF)
        return tl.inline_asm_elementwise(
            SETTLE, CONSTRAINTS,
            [rounded, x, distance, drawn.place, drawn.block, drawn.seed, drawn.stream, least, scale],
            dtype=tl.float32, is_pure=True, pack=8,
        )  # fmt: skip
    else:
        distance = (total + 1) & 0xFFFF
        return tl.inline_asm_elementwise(
            SETTLE_MANY_BITS, CONSTRAINTS_OF_MANY_BITS,
            [rounded, x, distance, drawn.place, drawn.block, drawn.seed, drawn.stream, least, scale, grid.low << 23, largest],
            dtype=tl.float32, is_pure=True, pack=8,
        )  # fmt: skip
