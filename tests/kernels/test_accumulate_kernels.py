"""Emulated accumulators in Numba loops and in Triton kernels (compiled on a GPU, otherwise interpreted), bit for bit the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import Stochastic
from qsim.accumulators import Accumulator, Aligned, BlockScaled, Promoted, Rounded, TwoStep, resolve
from qsim.formats import format as resolve_format
from qsim_kernels.numbers.sums import BlockScaledSum, Sum, is_single, noise_indices
from qsim_kernels.ops.backend import HAS_NUMBA
from qsim_kernels.torch import sums as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
}


def operands(
    formats: tuple[str, str], spread: float, special: float, batch: tuple[int, ...] = (), length: int = 37
) -> tuple[Tensor, Tensor]:
    """Matrices with exponents spread by some binades, some zeros, and some infinities and NaN; the first is stored transposed."""
    shapes = (*batch, 7, length), (*batch, length, 6)
    a, b = (_values(shape, fmt, spread, special) for shape, fmt in zip(shapes, formats, strict=True))
    return a.mT.contiguous().mT, b


def _values(shape: tuple[int, ...], fmt: str, spread: float, special: float) -> Tensor:
    x = torch.randn(shape) * torch.exp2(torch.randn(shape) * spread)
    chance = torch.rand(shape)
    x[chance < 0.1] = 0.0
    x[chance > 1 - special] = torch.inf
    x[(chance > 0.5) & (chance < 0.5 + special)] = -torch.inf
    x[(chance > 0.4) & (chance < 0.4 + special)] = torch.nan
    return x.to(DTYPES[fmt]).to(DEVICE)


def sum_of(setting: str) -> tuple[Sum, tuple[str, str]]:
    """A setting's description for the kernels, and its operands' formats."""
    accumulator, *formats = SETTINGS[setting]
    return resolve(accumulator).sum_of(*map(resolve_format, formats)), (formats[0], formats[1])


def computed(module: Any, a: Tensor, b: Tensor, how: Sum, offset: int = OFFSET, **options: Any) -> Tensor:
    """A product by one implementation."""
    out = torch.full((*a.shape[:-1], b.shape[-1]), 77.0, dtype=torch.float32 if is_single(how) else torch.float64, device=a.device)
    module.accumulate_into(out, a, b, how, (torch.tensor(3**25, device=a.device), STREAM, offset), **options)
    return out


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    word = torch.int32 if wanted.dtype == torch.float32 else torch.int64
    differing = found.view(word) != wanted.view(word)
    assert not differing.any(), (int(differing.sum()), found[differing][:4].tolist(), wanted[differing][:4].tolist())


def compare(module: Any, setting: str, spread: float, special: float, batch: tuple[int, ...], length: int = 37, **options: Any) -> None:
    how, formats = sum_of(setting)
    a, b = operands(formats, spread, special, batch, length)
    assert_same_bits(computed(module, a, b, how, **options).cpu(), computed(reference, a.cpu(), b.cpu(), how))


@pytest.mark.sampled(12)
@pytest.mark.skipif(not HAS_NUMBA or DEVICE.type != "cpu", reason="Numba's loops run on CPUs")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("spread", "special"), [(1.0, 0.0), (8.0, 0.003), (40.0, 0.003)])
def test_compiled_loops_are_the_reference(setting: str, spread: float, special: float) -> None:
    from qsim_kernels.numba import sums as loops

    compare(loops, setting, spread, special, (2,))


@pytest.mark.skipif(not HAS_NUMBA or DEVICE.type != "cpu", reason="Numba's loops run on CPUs")
@pytest.mark.parametrize(("setting", "scale"), [("groups", "e8m0"), ("groups, exact", "e5m2")])
@pytest.mark.parametrize("spread", [0.0, 30.0])
def test_compiled_loops_take_scales(setting: str, scale: str, spread: float) -> None:
    from qsim_kernels.numba import sums as loops

    how, formats = sum_of(setting)
    assert isinstance(how, BlockScaledSum)
    a, b = operands(formats, 1.0, 0.003, (2,), 20)
    p, q = (qsim.quantize(torch.exp2(torch.randn(2, lines, -(-20 // how.group)) * spread), scale) for lines in (7, 6))
    if scale == "e5m2":
        p[0, 2], q[1, 3, 0], q[1, 4, 1] = 0.0, torch.inf, torch.nan
    assert_same_bits(computed(loops, a, b, how, scales=(p, q)), computed(reference, a, b, how, scales=(p, q)))


@pytest.mark.skipif(not HAS_NUMBA or DEVICE.type != "cpu", reason="Numba's loops run on CPUs")
def test_compiled_loops_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are split among threads, also where their random bits do not begin a Philox block."""
    from qsim_kernels.numba import sums as loops, threads

    monkeypatch.setattr(threads, "GRAIN", 1 << 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    how, formats = sum_of("stochastic")
    a, b = operands(formats, 1.0, 0.0, (3,))
    assert_same_bits(computed(loops, a, b, how, offset=13), computed(reference, a, b, how, offset=13))


@pytest.mark.sampled(3)
@pytest.mark.skipif(not HAS_NUMBA or DEVICE.type != "cpu", reason="Numba's loops run on CPUs")
@pytest.mark.parametrize("setting", ["fp16", "stochastic", "chunks, stochastic", "pairwise, stochastic", "promoted, stochastic"])
@pytest.mark.parametrize(("length", "columns"), [(13, 300), (700, 60)])
def test_compiled_loops_of_more_columns_than_are_computed_together(setting: str, length: int, columns: int) -> None:
    from qsim_kernels.numba import sums as loops

    how, formats = sum_of(setting)
    a, b = _values((2, length), formats[0], 1.0, 0.0), _values((length, columns), formats[1], 1.0, 0.0)
    assert_same_bits(computed(loops, a, b, how, offset=13), computed(reference, a, b, how, offset=13))


# The interpreter computes with NumPy, which warns of NaN and infinity.
@pytest.mark.sampled(24)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("setting", SETTINGS)
def test_kernels_are_the_reference(setting: str) -> None:
    kernels = _kernels()
    if DEVICE.type == "cuda":
        for spread, special in ((1.0, 0.0), (8.0, 0.003), (40.0, 0.003)):
            compare(kernels, setting, spread, special, (2,))
    else:
        # The interpreter's time grows with tiles and steps: one tile, and more than one block, chunk or short sum.
        length = 37 if "promoted" in setting else 19
        compare(kernels, setting, 8.0, 0.003, (), length, tile=kernels.ResultTile(8, 8, 1))


@pytest.mark.parametrize("setting", ["fp8", "bf16 unit", "fp16 unit", "tf32 unit"])
def test_zeros_beside_huge_operands_do_not_count_in_kernels(setting: str) -> None:
    accumulator, fmt = {"tf32 unit": ("h100_tf32", "tf32")}.get(setting) or SETTINGS[setting][:2]
    how, dtype = resolve(accumulator).sum_of(*[resolve_format(fmt)] * 2), DTYPES.get(fmt, torch.float32)
    largest = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max))
    least = max(2.0**-25, torch.finfo(dtype).smallest_normal)
    a = torch.tensor([[0.0, largest, -0.0, least]] * 4, dtype=torch.float64).to(dtype).to(DEVICE)
    b = torch.tensor([[largest], [0.0], [largest], [1.0]], dtype=torch.float64).to(dtype).to(DEVICE).expand(4, 4)
    kernels = _kernels()
    options = {} if DEVICE.type == "cuda" else {"tile": kernels.ResultTile(4, 4, 1)}
    assert computed(kernels, a, b, how, **options).tolist() == [[least] * 4] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tiles_and_batches_do_not_change_kernels() -> None:
    kernels = _kernels()
    how, formats = sum_of("stochastic")
    a, b = operands(formats, 1.0, 0.0, (2,))
    wanted = computed(reference, a[:, :3, :9], b[:, :9], how)
    assert_same_bits(computed(kernels, a[:, :3, :9], b[:, :9], how, tile=kernels.ResultTile(2, 4, 1)), wanted)


@pytest.mark.sampled(6)
@pytest.mark.skipif(DEVICE.type != "cpu", reason="GPUs with such a unit are tested above")
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting.startswith("chunks")])
@pytest.mark.parametrize(("rows", "length", "columns"), [(16, 64, 32), (7, 41, 18)])
def test_chunks_on_a_gpus_own_unit(setting: str, rows: int, length: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of small integers are exact on every unit, and in NumPy, which takes the unit's place in the interpreter."""
    kernels = _kernels()
    monkeypatch.setattr(kernels, "_unit_dtype", lambda *given: torch.float16)
    how, _ = sum_of(setting)
    a, b = (torch.randint(-32, 32, shape).to(torch.float16) for shape in ((2, rows, length), (2, length, columns)))
    found = computed(kernels, a, b, how, tile=kernels.ResultTile(16, 16, 1))
    assert_same_bits(found, computed(reference, a, b, how))


@pytest.mark.parametrize("setting", ["fp8", "fp16", "stochastic", "chunks"])
def test_sums_of_nothing_are_zero(setting: str) -> None:
    kernels = _kernels()
    how, formats = sum_of(setting)
    a, b = torch.ones(2, 0, dtype=DTYPES[formats[0]], device=DEVICE), torch.ones(0, 3, dtype=DTYPES[formats[1]], device=DEVICE)
    for module in _implementations(kernels):
        assert_same_bits(computed(module, a, b, how), torch.zeros(2, 3, device=DEVICE))
        assert computed(module, a[:0], b, how).shape == (0, 3)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("setting", ["fp8", "fp16", "stochastic", "chunks", "chunks of fp32"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 17, 3), (3, 2, 1)])
def test_single_rows_and_columns(setting: str, shape: tuple[int, int, int]) -> None:
    rows, length, columns = shape
    how, formats = sum_of(setting)
    a, b = (torch.randn(size).to(DTYPES[fmt]).to(DEVICE) for size, fmt in zip(((rows, length), (length, columns)), formats, strict=True))
    for module in _implementations(_kernels()):
        assert_same_bits(computed(module, a, b, how), computed(reference, a, b, how))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_negative_zeros_in_compensated_sums() -> None:
    """Without subnormals sums round to -0, whose sign a compensated sum must keep like the reference."""
    how = Rounded(qsim.Float(5, 7, specials="ieee", subnormals=False), order="kahan").sum_of(*[resolve_format("bf16")] * 2)
    least = 2.0**-14
    a = torch.tensor([[-1.5, 1.25, -0.0], [1.5, -1.75, 0.0], [-0.0, -1.0, 1.0]], dtype=torch.bfloat16, device=DEVICE)
    b = torch.full((3, 1), least, dtype=torch.bfloat16, device=DEVICE)
    for module in _implementations(_kernels()):
        assert_same_bits(computed(module, a, b, how), computed(reference, a, b, how))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
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
    for module in _implementations(_kernels()):
        assert_same_bits(computed(module, a, b, how), wanted)


def test_random_numbers_per_element_are_a_multiple_of_eight() -> None:
    """On this the kernels rely."""
    for setting in SETTINGS:
        how, _ = sum_of(setting)
        assert noise_indices(how, 37) % 8 == 0


def _kernels() -> Any:
    pytest.importorskip("triton")
    from qsim_kernels.triton.accumulate import launch as sums
    from support import interpreter

    interpreter.speed_up()
    return sums


def _implementations(kernels: Any) -> list[Any]:
    if DEVICE.type == "cpu" and HAS_NUMBA:
        from qsim_kernels.numba import sums as loops

        return [kernels, loops]
    return [kernels]
