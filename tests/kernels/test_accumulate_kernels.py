"""Emulated accumulators in Numba loops and in Triton kernels (compiled on a GPU, otherwise interpreted), bit for bit the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import Stochastic
from qsim.accumulators import NAMED, Accumulator, Aligned, BlockScaled, Promoted, Rounded, TwoStep, resolve
from qsim.formats import Format, format as resolve_format
from qsim_kernels.numbers.sums import Sum, is_single, noise_indices
from qsim_kernels.ops.backend import HAS_NUMBA
from qsim_kernels.torch import sums as reference

pytest.importorskip("triton")
from qsim_kernels.triton.accumulate import launch as kernels
from support import interpreter

interpreter.speed_up()

# The interpreter computes with NumPy, which warns of NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_LOOPS = HAS_NUMBA and DEVICE.type == "cpu"
NEEDS_LOOPS = pytest.mark.skipif(not HAS_LOOPS, reason="Numba's loops run on CPUs")
if HAS_LOOPS:
    from qsim_kernels.numba import sums as loops, threads
#: The interpreter's time grows with tiles.
TILE = None if DEVICE.type == "cuda" else kernels.ResultTile(8, 8, 1)
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STREAM, OFFSET = 5, 16

#: Accumulators, each with its operands' formats.
SETTINGS = {
    "fp8": ("h100_fp8", "e4m3", "e5m2"),
    "fp8, promoted": (Promoted("h100_fp8", 32), "e5m2", "e4m3"),
    "bf16 unit": ("h100_bf16", "bf16", "bf16"),
    "fp16 unit": ("a100_fp16", "fp16", "fp16"),
    "odd block, nearest": (Aligned(5, 13, "fp16", rounding="nearest"), "bf16", "bf16"),
    "float32, nearest": (Aligned(4, 30, rounding="nearest"), "bf16", "bf16"),
    "short in float64": (Aligned(32, 13, "e8m13ieee"), "bf16", "bf16"),
    "wide fraction": (Aligned(64, 40), "fp32", "fp32"),
    "groups": (BlockScaled(6, 20, 3), "bf16", "fp32"),
    "groups, exact": (BlockScaled(6, 9, 2, "e5m2", exact=True), "e4m3", "e4m3"),
    "two steps": (TwoStep(8, 24, 31), "bf16", "bf16"),
    "two steps apart": (TwoStep(5, 9, 12, apart=True), "fp32", "fp32"),
    "fp16": (Rounded("fp16"), "bf16", "bf16"),
    "fp16, fp32 operands": (Rounded("fp16"), "fp32", "fp32"),
    "bf16": (Rounded("bf16"), "fp32", "fp32"),
    "fp32": (Rounded("fp32"), "fp32", "fp32"),
    "e4m3": (Rounded("e4m3"), "bf16", "bf16"),
    "saturating": (Rounded("e5m2", overflow="saturate"), "bf16", "bf16"),
    "toward zero": (Rounded("fp16", rounding="toward_zero"), "bf16", "bf16"),
    "up": (Rounded("bf16", rounding="up"), "bf16", "bf16"),
    "odd": (Rounded("fp16", rounding="odd"), "bf16", "bf16"),
    "away": (Rounded("e5m2", rounding="nearest_away"), "bf16", "bf16"),
    "ties up": (Rounded("e6m9", rounding="nearest_up"), "bf16", "bf16"),
    "fixed": (Rounded(qsim.Fixed(16, 8)), "bf16", "bf16"),
    "unsigned": (Rounded(qsim.Float(4, 3, signed=False)), "bf16", "bf16"),
    "no subnormals": (Rounded(qsim.Float(5, 7, specials="ieee", subnormals=False)), "bf16", "bf16"),
    "products": (Rounded("fp16", product="fp16"), "bf16", "bf16"),
    "products, stochastic": (Rounded("fp16", product="bf16", rounding="stochastic"), "bf16", "bf16"),
    "kahan": (Rounded("fp16", order="kahan"), "bf16", "bf16"),
    "kahan, stochastic": (Rounded("bf16", order="kahan", rounding="stochastic"), "bf16", "bf16"),
    "kahan, products, stochastic": (Rounded("bf16", order="kahan", product="fp16", rounding=Stochastic(9)), "bf16", "bf16"),
    "pairwise": (Rounded("fp16", order="pairwise"), "bf16", "bf16"),
    "pairwise, stochastic": (Rounded("fp16", order="pairwise", rounding="stochastic"), "bf16", "bf16"),
    "stochastic": (Rounded("fp16", rounding="stochastic"), "bf16", "bf16"),
    "stochastic, saturating": (Rounded("e4m3", rounding="stochastic", overflow="saturate"), "bf16", "bf16"),
    "stochastic, 8 bits": (Rounded("e5m2", rounding=Stochastic(8)), "bf16", "bf16"),
    "stochastic, 5 bits, corrected": (Rounded("bf16", rounding=Stochastic(5, correction=True)), "bf16", "bf16"),
    "stochastic, 16 bits, corrected": (Rounded("fp16", rounding=Stochastic(16, correction=True)), "bf16", "bf16"),
    "stochastic, 32 bits, corrected": (Rounded("fp16", rounding=Stochastic(32, correction=True)), "bf16", "bf16"),
    "stochastic, fixed": (Rounded(qsim.Fixed(16, 8), rounding="stochastic"), "bf16", "bf16"),
    "stochastic, fp32": (Rounded("fp32", rounding=Stochastic(20)), "fp32", "fp32"),
    "promoted": (Promoted(Rounded("fp16"), 8), "bf16", "bf16"),
    "promoted, stochastic": (Promoted(Rounded("fp16", rounding="stochastic"), 12), "bf16", "bf16"),
    "chunks": (Rounded("fp16", chunk=16), "bf16", "bf16"),
    "chunks of fp32": (Rounded("fp16", chunk=16), "fp32", "fp32"),
    "chunks of fp8": (Rounded("bf16", chunk=32), "e4m3", "e5m2"),
    "chunks, kahan": (Rounded("fp16", chunk=16, order="kahan"), "fp16", "fp16"),
    "chunks, stochastic": (Rounded("fp16", chunk=16, rounding="stochastic"), "bf16", "bf16"),
    "chunks, promoted": (Promoted(Rounded("bf16", chunk=16, rounding="stochastic"), 32), "bf16", "bf16"),
    # Of sums in two steps: with and without products beyond 2**128, and subnormal operands.
    "cdna3_bf16": ("cdna3_bf16", "bf16", "bf16"),
    "cdna3_fp16": ("cdna3_fp16", "fp16", "fp16"),
    "cdna3_tf32": ("cdna3_tf32", "tf32", "tf32"),
    "cdna3_fp8": ("cdna3_fp8", "e4m3fnuz", "e4m3fnuz"),
    "one product": (TwoStep(1, 24, 31), "fp32", "fp32"),
    "one product, apart": (TwoStep(1, 3, 2, apart=True), "bf16", "bf16"),
    "two steps, wide": (TwoStep(6, 40, 40), "fp32", "fp32"),
    "b200_mxfp8": ("b200_mxfp8", "e4m3", "e4m3"),
    "b200_nvfp4": ("b200_nvfp4", "e2m1", "e2m1"),
    "groups, in float32": (BlockScaled(6, 13, 3), "bf16", "bf16"),
}
#: Units that multiply by scales, and formats of operands and scales.
SCALED: dict[str, tuple[BlockScaled, str, str]] = {
    "mxfp8": (BlockScaled(32, 25, 32), "e4m3", "e8m0"),
    "groups of three": (BlockScaled(6, 20, 3, "e5m2"), "e5m2", "e5m2"),
    "wide": (BlockScaled(16, 13, 4), "bf16", "e8m0"),
    "nvfp4": (BlockScaled(64, 35, 16, "e4m3", exact=True), "e2m1", "e4m3"),
    "mxfp4": (BlockScaled(64, 35, 16, exact=True), "e2m1", "e8m0"),
    "exact groups of three": (BlockScaled(6, 9, 3, "e5m2", exact=True), "e4m3", "e5m2"),
    "exact groups of 32": (BlockScaled(32, 20, 32, exact=True), "e4m3fnuz", "e8m0"),
}


def implementations() -> list[Any]:
    """Those that this machine has, without the reference."""
    return [kernels, loops] if HAS_LOOPS else [kernels]


def values(shape: tuple[int, ...], fmt: str | Format, spread: float, special: float = 0.0) -> Tensor:
    """Values of a format with exponents spread by some binades, zeros of both signs, and, if it has them, infinities and NaN."""
    x, chance, resolved = torch.randn(shape) * torch.exp2(torch.randn(shape) * spread), torch.rand(shape), resolve_format(fmt)
    x[chance < 0.05], x[(chance > 0.05) & (chance < 0.1)] = 0.0, -0.0
    x = qsim.quantize(x, resolved, overflow="saturate")
    if resolved.has_inf:
        x[(chance > 0.5) & (chance < 0.5 + special)], x[(chance > 0.6) & (chance < 0.6 + special)] = torch.inf, -torch.inf
    if resolved.has_nan:
        x[(chance > 0.4) & (chance < 0.4 + special)] = torch.nan
    return x.to(DTYPES.get(str(fmt), torch.float32))


def scales(shape: tuple[int, ...], fmt: str | Format, spread: float, special: float = 0.0) -> Tensor:
    """Scales in a format, as sums take them: in float32."""
    return values(shape, fmt, spread, special).abs().float()


def sum_of(setting: str) -> tuple[Sum, tuple[str, str]]:
    """A setting's description for the kernels, and its operands' formats."""
    accumulator, *formats = SETTINGS[setting]
    return resolve(accumulator).sum_of(*map(resolve_format, formats)), (formats[0], formats[1])


def computed(module: Any, a: Tensor, b: Tensor, how: Sum, offset: int = OFFSET, **options: Any) -> Tensor:
    """A product by one implementation."""
    out = torch.full((*a.shape[:-1], b.shape[-1]), 77.0, dtype=torch.float32 if is_single(how) else torch.float64, device=a.device)
    if module is kernels:
        options = {"tile": TILE, **options}
    module.accumulate_into(out, a, b, how, (torch.tensor(3**25, device=a.device), STREAM, offset), **options)
    return out


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    word = torch.int32 if wanted.dtype == torch.float32 else torch.int64
    differing = found.view(word) != wanted.view(word)
    assert not differing.any(), (int(differing.sum()), found[differing][:4].tolist(), wanted[differing][:4].tolist())


def compare(a: Tensor, b: Tensor, how: Sum, modules: list[Any], scales: tuple[Tensor, Tensor] | None = None, **options: Any) -> None:
    """Assert that implementations give the reference's bits."""
    wanted = computed(reference, a, b, how, scales=scales, **options)
    for module in modules:
        device = DEVICE if module is kernels else torch.device("cpu")
        own = None if scales is None else (scales[0].to(device), scales[1].to(device))
        assert_same_bits(computed(module, a.to(device), b.to(device), how, scales=own, **options).cpu(), wanted)


SPREADS = [(1.0, 0.0), (8.0, 0.003), (50.0, 0.003)]


@pytest.mark.sampled(12)
@NEEDS_LOOPS
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("spread", "special"), SPREADS)
def test_loops_are_the_reference(setting: str, spread: float, special: float) -> None:
    how, formats = sum_of(setting)
    length = max(37, 2 * getattr(how, "block", 0) + 3)
    # The first operand is stored transposed.
    a, b = values((2, 7, length), formats[0], spread, special).mT.contiguous().mT, values((2, length, 6), formats[1], spread, special)
    compare(a, b, how, [loops])


@pytest.mark.sampled(24)
@pytest.mark.parametrize("setting", SETTINGS)
def test_kernels_are_the_reference(setting: str) -> None:
    how, formats = sum_of(setting)
    # The interpreter's time grows with tiles and steps: one tile, and more than one block, chunk or short sum.
    length = max(37 if "promoted" in setting else 19, min(2 * getattr(how, "block", 0) + 3, 131))
    for spread, special in SPREADS if DEVICE.type == "cuda" else SPREADS[1:2]:
        a, b = values((7, length), formats[0], spread, special).mT.contiguous().mT, values((length, 6), formats[1], spread, special)
        compare(a, b, how, [kernels])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("spread", "special", "batch"), [(0.0, 0.0, ()), (2.0, 0.02, (2,)), (40.0, 0.01, ())])
@pytest.mark.parametrize("name", SCALED)
def test_sums_with_scales(name: str, spread: float, special: float, batch: tuple[int, ...]) -> None:
    accumulator, fmt, scale = SCALED[name]
    how = accumulator.sum_of(*[resolve_format(fmt)] * 2)
    length = 2 * accumulator.block + accumulator.group + 1
    groups = -(-length // accumulator.group)
    a, b = values((*batch, 5, length), fmt, 1.0, special / 9), values((*batch, 3, length), fmt, 1.0, special / 9).mT
    given = scales((*batch, 5, groups), scale, spread, special), scales((*batch, 3, groups), scale, spread, special)
    compare(a, b, how, implementations(), given)


@pytest.mark.slow
def test_many_matrices_have_their_own_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are cut where a grid has no room for more matrices."""
    monkeypatch.setattr(kernels, "_MOST_BATCHES", 2)
    for accumulator, fmt, scale in (SCALED["mxfp8"], SCALED["nvfp4"]):
        how, groups = accumulator.sum_of(*[resolve_format(fmt)] * 2), -(-70 // accumulator.group)
        given = scales((3, 2, groups), scale, 1.0), scales((3, 2, groups), scale, 1.0)
        compare(values((3, 2, 70), fmt, 1.0), values((3, 70, 2), fmt, 1.0), how, [kernels], given)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "is_whole"), [("cdna3_fp8", True), ("stochastic", False), ("mxfp8", False), ("nvfp4", False)])
def test_several_tiles(name: str, is_whole: bool) -> None:
    """A tile per program, of the size that suits the device, with and without results beyond the last whole one."""
    rows, columns, tile = (3, 5, kernels.ResultTile(2, 4, 1)) if TILE else (130, 150, None)
    if is_whole:
        rows, columns = (4, 8) if TILE else (128, 128)
    length = 70 if name in SCALED else 19
    given = None
    if name in SCALED:
        accumulator, fmt, scale = SCALED[name]
        how, groups = accumulator.sum_of(*[resolve_format(fmt)] * 2), -(-length // accumulator.group)
        given = scales((2, rows, groups), scale, 2.0).to(DEVICE), scales((2, columns, groups), scale, 2.0).to(DEVICE)
    else:
        how, (fmt, _) = sum_of(name)
    a, b = values((2, rows, length), fmt, 2.0).to(DEVICE), values((2, length, columns), fmt, 2.0).to(DEVICE)
    assert_same_bits(computed(kernels, a, b, how, scales=given, tile=tile), computed(reference, a, b, how, scales=given))


@NEEDS_LOOPS
def test_loops_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are split among threads, also where their random bits do not begin a Philox block."""
    monkeypatch.setattr(threads, "GRAIN", 1 << 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    how, formats = sum_of("stochastic")
    compare(values((3, 7, 37), formats[0], 1.0), values((3, 37, 6), formats[1], 1.0), how, [loops], offset=13)


@pytest.mark.sampled(3)
@NEEDS_LOOPS
@pytest.mark.parametrize("setting", ["fp16", "stochastic", "chunks, stochastic", "pairwise, stochastic", "promoted, stochastic"])
@pytest.mark.parametrize(("length", "columns"), [(13, 300), (700, 60)])
def test_loops_of_more_columns_than_are_computed_together(setting: str, length: int, columns: int) -> None:
    how, formats = sum_of(setting)
    compare(values((2, length), formats[0], 1.0), values((length, columns), formats[1], 1.0), how, [loops], offset=13)


@pytest.mark.parametrize("setting", ["fp8", "bf16 unit", "fp16 unit", "tf32 unit"])
def test_zeros_beside_huge_operands_do_not_count_in_kernels(setting: str) -> None:
    accumulator, fmt = {"tf32 unit": ("h100_tf32", "tf32")}.get(setting) or SETTINGS[setting][:2]
    how, dtype = resolve(accumulator).sum_of(*[resolve_format(fmt)] * 2), DTYPES.get(fmt, torch.float32)
    largest = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max))
    least = max(2.0**-25, torch.finfo(dtype).smallest_normal)
    a = torch.tensor([[0.0, largest, -0.0, least]] * 4, dtype=torch.float64).to(dtype).to(DEVICE)
    b = torch.tensor([[largest], [0.0], [largest], [1.0]], dtype=torch.float64).to(dtype).to(DEVICE).expand(4, 4)
    assert computed(kernels, a, b, how).tolist() == [[least] * 4] * 4


@pytest.mark.sampled(6)
@pytest.mark.skipif(DEVICE.type != "cpu", reason="GPUs with such a unit are tested above")
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting.startswith("chunks")])
@pytest.mark.parametrize(("rows", "length", "columns"), [(16, 64, 32), (7, 41, 18)])
def test_chunks_on_a_gpus_own_unit(setting: str, rows: int, length: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of small integers are exact on every unit, and in NumPy, which takes the unit's place in the interpreter."""
    monkeypatch.setattr(kernels, "_unit_dtype", lambda *given: torch.float16)
    how, _ = sum_of(setting)
    a, b = (torch.randint(-32, 32, shape).to(torch.float16) for shape in ((2, rows, length), (2, length, columns)))
    found = computed(kernels, a, b, how, tile=kernels.ResultTile(16, 16, 1))
    assert_same_bits(found, computed(reference, a, b, how))


def test_tiles_of_a_b200_are_not_those_that_its_matrix_unit_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.7 gives it float64 products of 64 rows, and fails to compile; `test_compiled_offline` compiles for it."""
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    gpu = torch.device("cuda", 0)
    tiles = {}
    for capability in ((8, 0), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        tiles[capability] = kernels._tile_of_groups(gpu).rows
    assert tiles == {(8, 0): 64, (9, 0): 64, (10, 0): 32, (10, 3): 32, (11, 0): 32, (12, 0): 64}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU takes its own tile")
@pytest.mark.parametrize("rows", [32, 64])
def test_tiles_of_groups_give_the_same_bits(rows: int) -> None:
    how, (fmt, other) = sum_of("b200_nvfp4")
    a, b = values((70, 48), fmt, 1.0), values((48, 9), other, 1.0)
    found = computed(kernels, a, b, how, tile=kernels.ResultTile(rows, 64, 1))
    assert_same_bits(found, computed(reference, a, b, how))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", ["fp8", "fp16", "stochastic", "chunks", "chunks of fp32"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 17, 3), (3, 2, 1), (2, 0, 3), (0, 4, 3)])
def test_few_or_no_rows_columns_and_products(setting: str, shape: tuple[int, int, int]) -> None:
    rows, length, columns = shape
    how, formats = sum_of(setting)
    compare(values((rows, length), formats[0], 1.0), values((length, columns), formats[1], 1.0), how, implementations())


def test_negative_zeros_in_compensated_sums() -> None:
    """Without subnormals sums round to -0, whose sign a compensated sum must keep like the reference."""
    how = Rounded(qsim.Float(5, 7, specials="ieee", subnormals=False), order="kahan").sum_of(*[resolve_format("bf16")] * 2)
    least = 2.0**-14
    a = torch.tensor([[-1.5, 1.25, -0.0], [1.5, -1.75, 0.0], [-0.0, -1.0, 1.0]], dtype=torch.bfloat16, device=DEVICE)
    b = torch.full((3, 1), least, dtype=torch.bfloat16, device=DEVICE)
    for module in implementations():
        assert_same_bits(computed(module, a, b, how), computed(reference, a, b, how))


@pytest.mark.parametrize(
    "accumulator", [Aligned(1, 25), Aligned(4, 25, "bf16", rounding="nearest"), BlockScaled(4, 25, 2), TwoStep(4, 24, 31)]
)
def test_zeros_after_a_negative_sum_that_underflows(accumulator: Accumulator) -> None:
    """A sum of zero, also of -0 and products that are -0, is +0; one that is rounded to zero is -0 only in units that add in two steps."""
    how = accumulator.sum_of(*[resolve_format("bf16")] * 2)
    a = torch.full((2, 8), -0.0, dtype=torch.bfloat16, device=DEVICE)
    b = torch.ones(8, 1, dtype=torch.bfloat16, device=DEVICE)
    a[0, 0], a[1, 7], b[0], b[7] = -(2.0**-79), -(2.0**-79), 2.0**-79, 2.0**-79
    wanted = computed(reference, a, b, how)
    assert wanted.view(-1).tolist() == [0.0, 0.0]
    assert wanted.signbit().view(-1).tolist() == [False, isinstance(accumulator, TwoStep)]
    for module in implementations():
        assert_same_bits(computed(module, a, b, how), wanted)


@pytest.mark.parametrize("apart", [False, True])
def test_infinite_products_of_finite_operands(apart: bool) -> None:
    """Products of 2**128 or more are infinite, even if others would cancel them, and negative results that underflow are -0."""
    bf16 = resolve_format("bf16")
    how = TwoStep(4, 24, 31, apart=apart).sum_of(bf16, bf16)
    huge, least = 2.0**64, 2.0**-133
    rows = [
        [huge, -huge, 1, 1],
        [huge, huge, 0, 0],
        [huge * 0.996, huge * 0.5, huge * 0.5, 1],
        [-huge, 1, 1, 1],
        [-least, 0, 0, 0],
        [least, -least, 0.0, -0.0],
        [0.0, 0.0, -0.0, 0.0],
    ]
    columns = [[huge, huge, huge, huge], [huge, huge, -huge, huge], [least, least, least, -least], [1e-8, -1e-8, 1, -1]]
    a, b = torch.tensor(rows).bfloat16(), torch.tensor(columns).t().bfloat16()
    found = computed(kernels, a.to(DEVICE), b.to(DEVICE), how).cpu()
    assert_same_bits(found, computed(reference, a, b, how))
    assert found[0, 0].isnan()
    assert (found[1, 0].item(), found[3, 0].item()) == (math.inf, -math.inf)


def test_random_numbers_per_element_are_a_multiple_of_eight() -> None:
    """On this the kernels rely."""
    for setting in SETTINGS:
        assert noise_indices(sum_of(setting)[0], 37) % 8 == 0


# The operators on a GPU and on a CPU, at the sizes of several tiles.


@pytest.fixture
def _only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    in_plain_torch = reference.accumulate_into

    def refuse_on_gpus(out: Tensor, *arguments: Any) -> None:
        assert not out.is_cuda, "this ran in plain torch"
        in_plain_torch(out, *arguments)

    monkeypatch.setattr(reference, "accumulate_into", refuse_on_gpus)


def _bits_of(fn: Any, *arguments: Any) -> list[Tensor]:
    """The same operator on the GPU and on the CPU."""
    moved = [x.cuda() if isinstance(x, Tensor) else x for x in arguments]
    return [fn(*moved).cpu(), fn(*arguments)]


@pytest.mark.gpu
@pytest.mark.usefixtures("_only_kernels")
@pytest.mark.parametrize("name", [name for name, unit in NAMED.items() if isinstance(unit, (TwoStep, BlockScaled))])
def test_units_on_a_gpu(name: str) -> None:
    unit = NAMED[name]
    assert unit.taken is not None
    for fmt in unit.taken:
        a, b = values((2, 130, 333), fmt, 2.0, 1e-5), values((2, 333, 150), fmt, 2.0, 1e-5)
        assert_same_bits(*_bits_of(torch.ops.qsim.accumulate, a, b, None, unit.spelled(fmt, fmt), 0, 0))


@pytest.mark.gpu
@pytest.mark.usefixtures("_only_kernels")
@pytest.mark.parametrize("name", SCALED)
def test_scales_on_a_gpu(name: str) -> None:
    accumulator, fmt, scale = SCALED[name]
    groups = -(-333 // accumulator.group)
    a, b = values((2, 130, 333), fmt, 1.0, 1e-5), values((2, 333, 150), fmt, 1.0, 1e-5)
    given = (scales((2, lines, groups), scale, 3.0, 1e-4) for lines in (65, 150))
    how = accumulator.spelled(*[resolve_format(fmt)] * 2)
    assert_same_bits(*_bits_of(torch.ops.qsim.accumulate_scaled, a, b, *given, [2, 1, 1, 1], None, how, 0, 0))


@pytest.mark.parametrize("columns", [1 << 16, (1 << 16) * 64])
def test_a_launch_has_all_tiles_in_its_first_dimension(columns: int) -> None:
    """CUDA limits the others to 65,535 programs."""
    grids: list[tuple[int, int, int]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments, **options: grids.append(grid)

    tile = kernels.ResultTile(2, 32, 1)
    out, a, b = (torch.empty(3, *shape, device="meta") for shape in ((6, columns), (6, 4), (4, columns)))
    adder = resolve("h100_fp8").sum_of(*map(resolve_format, ("e4m3", "e4m3")))
    product = kernels.ProductLaunch(out, a, b, None, adder, (None, 0, 0), tile)
    product.run(Kernel(), tile, kernels.Planes(a, None, 6, 4), kernels.Planes(b, None, columns, 4), (), adders=[()])
    assert grids == [(3 * columns // 32, 1, 3)]
