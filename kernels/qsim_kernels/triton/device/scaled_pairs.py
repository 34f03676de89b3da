"""Rounding to bfloat16 values under the scales of their tiles, two elements per instruction, stochastic as in `pairs` or nearest.

Scales that are powers of two divide and multiply pairs exactly. Under others, quotients and most products are float32, one by one. So are
values that were transformed.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from qsim_kernels.triton.device.pairs import (
    COMMON,
    PAIRS,
    Ends,
    Registers,
    in_both_halves,
    in_one_block,
    in_quads,
    pair_as_powers,
    registers,
    split,
    steps_of_pair,
    text,
)
from qsim_kernels.triton.device.tile_scales import CEIL
from qsim_kernels.triton.placement import Placement


class ScaledForm(NamedTuple):
    """A rounding under scales that kernels are compiled for.

    Attributes:
        divides_pairs: Whether scales are powers of two, whose inverses are given as pairs of bfloat16; otherwise as float32.
        multiplies_pairs: Whether products with scales are bfloat16 numbers, so that scales are given as pairs; otherwise as float32.
        clamps: Whether products beyond the largest bfloat16 become that.
    """

    divides_pairs: bool
    multiplies_pairs: bool
    clamps: bool

    @property
    def code(self) -> tuple[str, str]:
        """The PTX, and the constraints of its operands."""
        inverses = {"top": "r"} | ({"inverse": "r"} if self.divides_pairs else {"inverse0": "f", "inverse1": "f"})
        named, constraints = registers(
            PAIRS, {name: (kind, PAIRS) for name, kind in ({"x": "r"} | COMMON | inverses | _factors(self)).items()}
        )
        quotients = (_clamped_pair, pair_as_powers) if self.divides_pairs else (_quotient, _powers)
        return Placement(thread=PAIRS).mark(text(Ends(*quotients, self._written), named)), constraints

    def _written(self, i: int, of: Registers) -> list[str]:
        if self.divides_pairs:
            return _signed(f"pair{i}") + _multiplied(self, i, of)
        return _clamped(i, of) + _signed(of["x"][i]) + _multiplied(self, i, of)


class TurnedForm(NamedTuple):
    """A rounding of transformed values, float32 quotients, that kernels are compiled for.

    Attributes:
        multiplies_pairs: See `ScaledForm`.
        clamps: See `ScaledForm`.
        in_quads: See `pairs.in_quads`; otherwise pairs are in one Philox block.
        is_within: Whether no quotient exceeds the largest magnitude.
    """

    multiplies_pairs: bool
    clamps: bool
    in_quads: bool
    is_within: bool

    @property
    def code(self) -> tuple[str, str]:
        """The PTX, and the constraints of its operands."""
        others = {name: (kind, 1) for name, kind in (COMMON | {"top": "r"} | _factors(self)).items()}
        named, constraints = registers(PAIRS, {"x": ("f", 2 * PAIRS)} | others)
        named |= {name: named[name] * PAIRS for name in others}
        drawn, placement = (in_quads, Placement(lanes=PAIRS)) if self.in_quads else (in_one_block, Placement())
        return placement.mark(text(Ends(_given, _powers, self._written), named, drawn)), constraints

    def _written(self, i: int, of: Registers) -> list[str]:
        x = of["x"][2 * i : 2 * i + 2]
        signs = [f"mov.b32 bits, {x[0]};", f"mov.b32 random, {x[1]};", "prmt.b32 bits, bits, random, 0x7632;", *_signed("bits")]
        return ([] if self.is_within else _clamped(i, of)) + signs + _multiplied(self, i, of)


class NearestForm(NamedTuple):
    """Round-to-nearest, ties to even, under scales that are powers of two, as kernels are compiled for it.

    The power of two whose last place is the spacing is added and subtracted, as in `rounding.round_nearest`, in bfloat16.

    Attributes:
        clamps: See `ScaledForm`.
    """

    clamps: bool

    @property
    def multiplies_pairs(self) -> bool:
        """See `ScaledForm`; powers of two are bfloat16 numbers."""
        return True

    @property
    def code(self) -> tuple[str, str]:
        """The PTX, and the constraints of its operands."""
        of, constraints = registers(1, dict.fromkeys(("x", "lift", "lowest", "top", "inverse", "factor"), ("r", 1)))
        lines = [".reg .b32 bits, rounded, pair0, power0;", *_clamped_quotient(0, of), *pair_as_powers(0, of), *steps_of_pair(0, of)]
        lines += ["abs.bf16x2 rounded, pair0;", "add.bf16x2 rounded, rounded, power0;", "sub.bf16x2 rounded, rounded, power0;"]
        return "{" + "\n".join([*lines, *_signed("pair0"), *_multiplied(self, 0, of), "}"]), constraints


def _factors(form: ScaledForm | TurnedForm) -> dict[str, str]:
    """The kinds of the registers of a rounded pair's factors."""
    return {"factor": "r"} if form.multiplies_pairs else {"factor0": "f", "factor1": "f"}


def _clamped(i: int, of: Registers) -> list[str]:
    """PTX that clamps a rounded pair, whose magnitudes are not less than the largest, or NaN, where those of quotients are larger."""
    return [f"min.bf16x2 rounded, rounded, {of['top'][i]};"]


def _signed(signs: str) -> list[str]:
    """PTX that gives a rounded pair its signs."""
    return [f"lop3.b32 rounded, rounded, {signs}, 0x80008000, 0xF8;"]


def _multiplied(form: ScaledForm | TurnedForm | NearestForm, i: int, of: Registers) -> list[str]:
    """PTX that multiplies a rounded pair by its factors."""
    if form.multiplies_pairs:
        lines = [f"mul.bf16x2 ${i}, rounded, {of['factor'][i]};"]
    else:
        lines = [*split("rounded", 0), f"mul.f32 total, value, {of['factor0'][i]};"]
        lines += [*split("rounded", 1), f"mul.f32 value, value, {of['factor1'][i]};"]
        lines += [f"cvt.rn{'.satfinite' if form.clamps else ''}.bf16x2.f32 ${i}, value, total;"]
    if form.clamps and form.multiplies_pairs:
        lines += ["mov.b32 bits, 0x7F7F7F7F;", f"min.NaN.xorsign.abs.bf16x2 ${i}, ${i}, bits;"]
    return lines


def _clamped_quotient(i: int, of: Registers) -> list[str]:
    return [f"mul.bf16x2 pair{i}, {of['x'][i]}, {of['inverse'][i]};", f"min.xorsign.abs.bf16x2 pair{i}, pair{i}, {of['top'][0]};"]


def _clamped_pair(i: int, half: int, of: Registers) -> list[str]:
    return [*_clamped_quotient(i, of), *split(f"pair{i}", half)]


def _quotient(i: int, half: int, of: Registers) -> list[str]:
    return [*split(of["x"][i], half), f"mul.f32 value, value, {of[f'inverse{half}'][i]};"]


def _given(i: int, half: int, of: Registers) -> list[str]:
    return [f"mov.f32 value, {of['x'][2 * i + half]};"]


def _powers(i: int, of: Registers) -> list[str]:
    return [f"prmt.b32 power{i}, sum{2 * i}, sum{2 * i + 1}, 0x7632;"]


#: PTX for scales that are powers of two, and their inverses, from magnitudes: the steps of `powers_as_scales` on pairs.
POWERS_OF_PAIRS: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 power;
    add.u32 power, $2, $3;
    and.b32 power, power, 0x7F807F80;
    add.s16x2 power, power, $4;
    max.s16x2 power, power, $5;
    min.s16x2 power, power, $6;
    max.s16x2 $0, power, $7;
    sub.u32 $1, $6, power;
    max.s16x2 $1, $1, $7;
    fma.rn.bf16x2 $0, $2, $5, $0;
    min.u16x2 $0, $0, $8;
    }"""
)


@triton.jit
def powers_of_pairs(amax, making, RULE: tl.constexpr):
    """`tile_scales.powers_as_scales` for pairs of bfloat16: scales and their inverses."""
    raised = 0
    if RULE == CEIL:
        raised = in_both_halves(0x7F - ((making.largest >> 45).to(tl.int32) & 0x7F))
    power = in_both_halves((making.power.to(tl.int32) << 7) & 0xFFFF)
    return tl.inline_asm_elementwise(
        POWERS_OF_PAIRS, "=&r,=&r,r,r,r,r,r,r,r",
        [amax, raised, power, 0, 0x7F007F00, 0x00400040, 0x7FC07FC0], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def pair_of(first, second):
    """Float32 numbers with at most 8 significant bits as a pair of bfloat16."""
    return ((first.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (second.to(tl.int32, bitcast=True) & -0x10000)


@triton.jit
def limits_of(grid):
    """The numbers of a grid that texts take, in both halves: the lift of powers, the lowest power, and the largest magnitude."""
    lift = in_both_halves((grid.shift - 16) << 7)
    return lift, in_both_halves(grid.low << 7) + lift, in_both_halves(grid.top >> 16)


@triton.jit
def rounded_pairs(x, block, noise, inverses, factors, grid, FORM: tl.constexpr, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr):
    """Round pairs of bfloat16 under scales.

    Args:
        x: Pairs, of which a thread holds the four of a Philox block.
        block: The number of each pair's Philox block.
        noise: A `Noise`.
        inverses: The inverses of scales as tuples: pairs, or those of first and of second elements.
        factors: What rounded elements are multiplied by, likewise.
        grid: `GridNumbers`; for which grids, `arguments.has_scaled_pairs` decides.
        FORM: A `ScaledForm`.
        TEXT: Its text.
        CONSTRAINTS: Its constraints.
    """
    given = (x, block, noise.seed, noise.stream) + limits_of(grid) + inverses + factors  # noqa: RUF005 (Triton has no stars)
    return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, given, dtype=tl.int32, is_pure=True, pack=4)


@triton.jit
def nearest_pairs(x, inverses, factors, grid, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr):
    """Round pairs of bfloat16 to nearest under scales that are powers of two.

    Args:
        x: Pairs.
        inverses: The inverses of scales as pairs.
        factors: The scales as pairs.
        grid: `GridNumbers`; for which grids, `arguments.has_scaled_pairs` decides.
        TEXT: The text of a `NearestForm`.
        CONSTRAINTS: Its constraints.
    """
    given = (x,) + limits_of(grid) + (inverses, factors)  # noqa: RUF005 (Triton has no stars)
    return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, given, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def rounded_quotients(x, block, noise, factors, grid, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr):
    """Round eight quotients, the elements of four pairs, under scales.

    Args:
        x: The quotients as a tuple.
        block: The number of a Philox block; see `pairs.in_quads`.
        noise: A `Noise`.
        factors: What rounded elements are multiplied by: pairs, or those of first and of second elements.
        grid: `GridNumbers`; for which grids, `arguments.has_scaled_pairs` decides.
        TEXT: The text of a `TurnedForm`.
        CONSTRAINTS: Its constraints.

    Returns:
        The pairs as a tuple.
    """
    given = x + (block, noise.seed, noise.stream) + limits_of(grid) + factors  # noqa: RUF005 (Triton has no stars)
    PAIRS_OF: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, given, dtype=PAIRS_OF, is_pure=True, pack=1)
