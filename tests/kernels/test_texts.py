"""Kernels that call texts in PTX, which only a GPU compiles: in Triton's interpreter, with 32 lanes in NumPy, compared with plain torch.

All random words once as they are, and once such that the last 16 bits decide; and faults planted in texts, which must be found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qsim

pytest.importorskip("triton")

import triton

from qsim.functional.arguments import spelling
from qsim.scaling import PerBlock, PerTile
from qsim.transforms import Hadamard
from qsim_kernels import torch as reference
from qsim_kernels.meanings import torch as meaning
from qsim_kernels.numbers.carrier import rounding_bits, used_bits, variant_of
from qsim_kernels.numbers.encoding import read_encoding, spell_encoding
from qsim_kernels.numbers.grid import Grid, GridRounding, Rule, read
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.ops.scaled import Implementation
from qsim_kernels.torch import sums
from qsim_kernels.torch.philox import ElementNoise, random_bits
from qsim_kernels.triton.accumulate import launch as products
from qsim_kernels.triton.device import directed, undecided as late
from qsim_kernels.triton.quantize import launch as kernels
from qsim_kernels.triton.quantize.transposes import encode_both_ways
from support import interpreter
from support.comparing import same_bits
from support.forced_words import ForcedWords, undecided
from support.lanes import texts_interpreted
from support.ptx import execute
from support.scaled_settings import REFERENCE

interpreter.speed_up()
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="where kernels are compiled, other tests call their texts"),
]

KERNELS = Implementation("qsim_kernels.triton.scaled.launch")
SEED, STREAM, OFFSET = 3, 7, 16
NOISE = torch.tensor(SEED), STREAM, OFFSET


@dataclass(frozen=True)
class Values:
    """Rounding to values, maybe of a matrix that is stored transposed."""

    format: str
    overflow: Any = "saturate"
    transposed: bool = False

    def operand(self, x: Tensor) -> Tensor:
        return x.t().contiguous().t() if self.transposed else x

    def both(self, x: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """The result of the kernel, and plain torch's."""
        spelt = spelling(self.format, "stochastic", self.overflow)
        rounding = GridRounding(read(Grid, spelt.grid), read(Rule, spelt.rule))
        x = self.operand(x)

        def by(quantize_into: Callable[..., Any]) -> Tensor:
            out = torch.empty_like(x)
            quantize_into(out, x, rounding, NOISE)
            return out.contiguous()

        return lambda: by(kernels.quantize_into), lambda: by(reference.quantize_into)


@dataclass(frozen=True)
class Codes:
    """Rounding to codes."""

    format: str

    def both(self, x: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """The result of the kernel, and plain torch's."""
        spelt = qsim.Quantizer(self.format, "stochastic").spelt
        encoding = read_encoding(spell_encoding(spelt.grid, spelt.rule, spelt.coding))

        def by(encode_into: Callable[..., Any]) -> Tensor:
            out = torch.empty(x.shape, dtype=torch.uint8)
            encode_into(out, x, encoding, NOISE, check=False)
            return out

        return lambda: by(kernels.encode_into), lambda: by(reference.encode_into)


@dataclass(frozen=True)
class Converted:
    """Rounding to the nearest codes, by a GPU's conversions, of a matrix and its transpose."""

    format: str
    overflow: Any = "saturate"
    rounding = "nearest"

    def both(self, x: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """The result of the kernel, and plain torch's."""
        spelt = qsim.Quantizer(self.format, "nearest", overflow=self.overflow).spelt
        codes = spell_encoding(spelt.grid, spelt.rule, spelt.coding), 0, torch.uint8
        ways = (
            (lambda each=each: torch.cat([y.reshape(-1) for y in each(x, None, codes, codes)]))
            for each in (encode_both_ways, reference.encode_both_ways)
        )
        return next(ways), next(ways)


@dataclass(frozen=True)
class Tiles:
    """Rounding under the scales of tiles, maybe after a transform."""

    format: str
    scaling: Any
    rounding: str = "stochastic"
    hadamard: int = 0
    outer: float | None = None
    restore: Restore = field(default=Restore.SCALE)
    dtype: torch.dtype = torch.bfloat16

    def both(self, x: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """The result of the kernel, and plain torch's."""
        x = x.to(self.dtype)
        spelt = spelling(self.format, self.rounding, "saturate")
        turn = Hadamard(self.hadamard, seed=3).turn(x.shape, self.scaling.dim) if self.hadamard else ()
        numbers = self.scaling.tiles(x.shape), turn, *self.scaling.spelling(spelt.format)
        seed = torch.tensor(SEED) if spelt.is_stochastic else None
        noise = seed, spelt.grid, spelt.rule, STREAM, OFFSET, self.dtype, int(self.restore)
        outer = None if self.outer is None else torch.tensor(self.outer)
        ways = ((lambda each=each: each.quantize_tiles(x, outer, *numbers, *noise)[0]) for each in (KERNELS, REFERENCE))
        return next(ways), next(ways)


Case = Values | Codes | Converted | Tiles

#: A case for each text, and for each way of drawing its random words.
CASES: dict[str, Case] = {
    "settled": Values("e4m3"),
    "columns": Values("e4m3", transposed=True),
    "columns, nonfinite": Values("e5m2", "nonfinite", transposed=True),
    "codes that fill bytes": Codes("e4m3"),
    "narrow codes": Codes("e2m1"),
    "converted codes": Converted("e4m3", "nonfinite"),
    "powers of two": Tiles("e4m3", PerBlock(32, -1, "e8m0", "floor")),
    "numbers": Tiles("e4m3", PerBlock(32, -1, "e8m0")),
    "powers of two, nearest": Tiles("e4m3", PerBlock(32, -1, "e8m0", "ceil"), "nearest"),
    "numbers that two lanes share": Tiles("e2m1", PerBlock(16, -1, "e4m3"), outer=0.37),
    "transformed along rows": Tiles("e2m1", PerBlock(16, -1, "e4m3"), hadamard=16, outer=0.37),
    "transformed in quads": Tiles("e2m1", PerBlock(32, 0, "e8m0", "ceil"), hadamard=32),
}
#: More formats and shapes of the same texts.
MORE: dict[str, Case] = {
    **{
        f"columns {name} {overflow}": Values(name, overflow, True)
        for name in ("e5m2", "e2m1", "e3m2")
        for overflow in ("saturate", "nonfinite")
    },
    **{f"codes {name}": Codes(name) for name in ("e5m2", "e3m2", "e2m3", "e3m4")},
    "converted codes, saturated": Converted("e4m3"),
    "converted codes, e5m2": Converted("e5m2"),
    "powers of two down": Tiles("e4m3", PerBlock(32, 0, "e8m0", "ceil")),
    "powers of two, nearest, of few values": Tiles("e2m1", PerBlock(32, -1, "e8m0", "floor"), "nearest"),
    "numbers down": Tiles("e2m1", PerBlock(16, 0, "e4m3", "ceil"), outer=0.37),
    "numbers that two lanes share, ceil": Tiles("e2m1", PerBlock(16, -1, "e4m3", "ceil"), outer=0.37, restore=Restore.ALL),
    "tiles": Tiles("e2m1", PerTile(4, 64, "bf16", "fit")),
    "transformed in quads under numbers": Tiles("e5m2", PerBlock(16, 0, "bf16", "fit"), hadamard=16),
    "transformed along rows, powers": Tiles("e4m3", PerBlock(32, -1), hadamard=32),
}
#: Those whose texts draw all words themselves.
DRAWN_IN_TEXTS = [name for name, case in CASES.items() if getattr(case, "rounding", "stochastic") == "stochastic" and "settled" not in name]


def matrix(rows: int = 32, columns: int = 64) -> Tensor:
    """Normal numbers, so that random bits matter, and smaller ones down to those whose last bits do."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(rows, columns, generator=generator) * torch.exp2(-30 * torch.rand(rows, columns, generator=generator))).bfloat16()


def with_special_values(x: Tensor) -> Tensor:
    x = x.clone()
    x[3, 5], x[7, 9], x[11, 40], x[:, 33], x[20] = math.nan, math.inf, -math.inf, 0, -0.0
    return x


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_kernels_with_texts_have_the_bits_of_plain_torch(name: str) -> None:
    by_kernel, by_torch = (CASES | MORE)[name].both(with_special_values(matrix()))
    with texts_interpreted() as texts:
        found = by_kernel()
    assert any(len(text) > 200 for text in texts), "the kernel takes another way"
    assert same_bits(found, by_torch())


@pytest.mark.parametrize("name", DRAWN_IN_TEXTS)
def test_the_last_random_bits_decide_where_the_first_do_not(name: str) -> None:
    by_kernel, by_torch = CASES[name].both(matrix())
    forced = ForcedWords(SEED, undecided(by_torch, OFFSET))
    with texts_interpreted(forced):
        found = by_kernel()
    with forced.in_plain_torch():
        expected = by_torch()
    with forced.in_plain_torch(with_last=False):
        without = by_torch()
    # Where all elements have positions of more than 16 bits; of bfloat16 values, only small ones do.
    assert (expected.view(torch.uint8) != without.view(torch.uint8)).float().mean() > 0.01
    assert same_bits(found, expected)


@pytest.mark.parametrize(("accumulator", "fmt"), [("h100_fp8", "e4m3"), ("h100_bf16", "bf16"), ("b200_nvfp4", "e2m1")])
def test_sums_with_texts(accumulator: str, fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products rounded in a direction, powers with signs and the largest exponents, by their instructions."""
    monkeypatch.setattr(directed, "INTERPRETED", False)
    how = qsim.accumulators.resolve(accumulator).sum_of(*[qsim.format(fmt)] * 2)
    a, b = (qsim.quantize(torch.randn(shape) * 4, fmt) for shape in ((5, 70), (70, 6)))
    expected, found = torch.empty(5, 6), torch.empty(5, 6)
    sums.accumulate_into(expected, a, b, how, NOISE)
    with texts_interpreted() as texts:
        products.accumulate_into(found, a, b, how, NOISE, tile=products.ResultTile(8, 8, 1))
    assert {"fma.rz"} <= {text[:6] for text in texts}
    assert same_bits(found, expected)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("shares_blocks", [False, True])
def test_undecided_elements_are_rounded_with_all_bits(many: bool, shares_blocks: bool) -> None:
    """Eight elements of a thread, of one Philox block or of several: a lane goes through as many as it holds."""
    x = (matrix() if not many else matrix().float() * torch.rand(matrix().shape)).float()
    spelt = spelling("e4m3", "stochastic", "saturate")
    grid, rule = read(Grid, spelt.grid), read(Rule, spelt.rule)
    bits = rounding_bits(grid, rule, False)
    x = x if many else torch.where(x.abs() < 2.0**-9, x, 0.0)
    rng = np.random.default_rng(1)
    index = np.arange(x.numel()) if shares_blocks else rng.integers(0, 2**50, x.numel())
    noise = ElementNoise(SEED, STREAM, torch.from_numpy(index))
    words = random_bits(noise, 32)
    rounding = meaning.rounding(bits.carrier)
    used = used_bits(bits.carrier, 32, False)
    patterns = x.view(torch.int32).reshape(-1).long()
    expected = rounding.round_bits(patterns.int(), rounding.random_bits(words, used), bits, variant_of(bits, rule))

    def each(values: Any, kind: Any = np.uint32) -> list[Any]:
        return [*np.broadcast_to(np.asarray(values).astype(kind), x.numel()).reshape(-1, 32, 8).transpose(2, 0, 1)]

    down = qsim.quantize(x.abs(), "e4m3", rounding="toward_zero").view(torch.int32).reshape(-1).numpy().view(np.uint32)
    operands = each(down) + each(patterns.numpy().astype(np.int32).view(np.uint32)) + each(0) + each(index & 7)
    operands += each(index >> 3, np.uint64) + each(SEED, np.uint64) + each(STREAM, np.uint64)
    operands += each(bits.least) + each((late.SCALED_BY.value - bits.least) & 0xFFFFFFFF)
    text, constraints = late.SETTLE, late.CONSTRAINTS
    if many:
        text, constraints = late.SETTLE_MANY_BITS, late.CONSTRAINTS_OF_MANY_BITS
        operands += each(bits.low << 23) + each(bits.top)
    found = execute(text.value, constraints.value, operands)
    assert (np.stack(found, -1).reshape(-1).view(np.int32) == expected.numpy()).all()


#: Faults in texts: the case that finds each, what is replaced by what, and whether words are forced.
FAULTS: dict[str, tuple[str, str, str, bool]] = {
    "lanes exchange words with the next but one": (
        "transformed in quads",
        "shfl.sync.bfly.b32 bits, bits, 1,",
        "shfl.sync.bfly.b32 bits, bits, 2,",
        False,
    ),
    "odd lanes keep the words of even ones": ("transformed in quads", "and.b32 bits, lane, 1;", "and.b32 bits, lane, 4;", False),
    "words are exchanged once": ("transformed in quads", "shfl.sync.bfly.b32 bits, bits, 2, 31, 0xFFFFFFFF;", "", False),
    "odd lanes compute the first scale": ("numbers that two lanes share", "selp.b32 $0, $2, $1, odd;", "selp.b32 $0, $1, $2, odd;", False),
    "scales come from another quad": ("numbers that two lanes share", "bfly.b32 other, $2, 1,", "bfly.b32 other, $2, 4,", False),
    "a loop of Philox is one round shorter": (
        "codes that fill bytes",
        "setp.lt.u32 again, round, 10;",
        "setp.lt.u32 again, round, 9;",
        True,
    ),
    "the last bits are the first": ("transformed along rows", "0x80000000;\nmov.b64 {last2", "0;\nmov.b64 {last2", True),
    "the last bits are not added": ("numbers that two lanes share", "add.u32 bits, bits, random;", "", True),
    "halves are in each other's place": ("columns", "0x7632;\nmov.b32 raised", "0x5410;\nmov.b32 raised", False),
    "a neighbour is 2 steps away": ("columns", "add.rz.f32 value, raised, value;", "add.rz.f32 value, value, value;", False),
    "NaN has the largest value's code": ("codes that fill bytes", "min.NaN.xorsign", "min.xorsign", False),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_texts_are_found(fault: str) -> None:
    name, text, other, is_forced = FAULTS[fault]
    by_kernel, by_torch = CASES[name].both(matrix() if is_forced else with_special_values(matrix()))
    forced = ForcedWords(SEED, undecided(by_torch, OFFSET)) if is_forced else None
    planted: list[bool] = []

    def change(original: str) -> str:
        planted.append(text in original)
        return original.replace(text, other)

    with texts_interpreted(forced, change):
        found = result_or_none(by_kernel)
    with nullcontext() if forced is None else forced.in_plain_torch():
        expected = by_torch()
    assert any(planted)
    assert found is None or not same_bits(found, expected)


def result_or_none(by_kernel: Callable[[], Tensor]) -> Tensor | None:
    """A kernel's result; none if a text does what a GPU does not define."""
    try:
        return by_kernel()
    except triton.runtime.errors.InterpreterError as error:
        if "UndefinedError" not in str(error):
            raise
    return None
