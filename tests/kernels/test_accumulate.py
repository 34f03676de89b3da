"""Emulated accumulators: the operator against exact arithmetic, in every implementation that this machine has."""

from __future__ import annotations

import ctypes
import ctypes.util
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import qsim
from qsim import Fixed, Float, Stochastic
from qsim.accumulators import NAMED, Accumulator, Aligned, BlockScaled, Promoted, Rounded, TwoStep
from qsim.formats import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, FP16, FP32, TF32, Format
from qsim.random import Noise
from qsim_kernels.numbers.sums import is_single, read_sum
from qsim_kernels.torch import sums as reference
from support.sum_oracle import Draw, exact_sum, indices

#: The exponents of the smallest normal numbers of operands' formats, written down by hand.
LOWS: dict[Format, int] = {E4M3: -6, E5M2: -14, BF16: -126, FP16: -14, TF32: -126, FP32: -126}
LOWS |= {E3M2: -2, E2M3: 0, E2M1: 0, E4M3FNUZ: -7, E5M2FNUZ: -15}
DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, BF16: torch.bfloat16, FP16: torch.float16}

ROUNDED = {
    "fp32": Rounded("fp32"),
    "fp16": Rounded("fp16"),
    "bf16, toward zero": Rounded("bf16", rounding="toward_zero"),
    "e8m13, up": Rounded("e8m13ieee", rounding="up"),
    "e5m2, away": Rounded("e5m2", rounding="nearest_away"),
    "e4m3, odd": Rounded("e4m3", rounding="odd"),
    "e4m3, saturating": Rounded("e4m3", rounding="down", overflow="saturate"),
    "no subnormals": Rounded(Float(5, 7, specials="ieee", subnormals=False), rounding="nearest_up"),
    "fixed": Rounded(Fixed(16, 8)),
    "fixed, wide": Rounded(Fixed(32, 16), rounding="toward_zero"),
    "a bias beyond float32": Rounded(Float(6, 10, bias=200)),
    "stochastic": Rounded("fp16", rounding="stochastic"),
    "stochastic, few bits": Rounded("e6m9", rounding=Stochastic(6, correction=True)),
    "stochastic, fp32": Rounded("fp32", rounding=Stochastic(28)),
    "stochastic, fixed": Rounded(Fixed(12, 6), rounding=Stochastic(8)),
    "products": Rounded("bf16", product="fp16"),
    "products, saturating": Rounded("bf16", product="fp16", overflow="saturate"),
    "products, integers": Rounded("fp16", product="int8"),
    "products, stochastic": Rounded("fp16", product="e4m3", rounding=Stochastic(5)),
    "pairwise": Rounded("fp16", order="pairwise"),
    "pairwise, stochastic": Rounded("bf16", order="pairwise", rounding=Stochastic(7)),
    "pairwise, products, stochastic": Rounded("bf16", order="pairwise", product="bf16", rounding=Stochastic(4)),
    "kahan": Rounded("bf16", order="kahan"),
    "kahan, stochastic, products": Rounded("fp16", order="kahan", product="fp16", rounding=Stochastic(9)),
    "chunks": Rounded("fp16", chunk=16),
    "chunks, stochastic": Rounded("e6m9", chunk=32, rounding="stochastic"),
    "chunks, pairwise": Rounded("bf16", chunk=16, order="pairwise"),
    "promoted": Promoted(Rounded("fp16"), 5),
    "promoted, stochastic": Promoted(Rounded("bf16", rounding=Stochastic(3)), 3),
    "promoted, pairwise": Promoted(Rounded("bf16", order="pairwise", rounding=Stochastic(3)), 6),
}
#: Units that add alike are tested once, by the first of their names.
_NAMES = {known: name for name, known in reversed(NAMED.items())}
ALIGNED = {
    **{name: known for known, name in _NAMES.items()},
    "three products": Aligned(3, 9),
    "fp16, nearest": Aligned(4, 24, out="fp16", rounding="nearest"),
    "one product": Aligned(1, 40, out="bf16"),
    "promoted": Promoted(Aligned(5, 11, out="e8m13ieee", rounding="nearest"), 10),
    "two steps": TwoStep(3, 9, 12),
    "two steps apart": TwoStep(4, 7, 8, apart=True),
    "groups": BlockScaled(6, 9, 3),
}
SEED, STREAM, OFFSET = 7, 3, 16


def implementations(a: Tensor, b: Tensor, how: str) -> list[Tensor]:
    """The results of the operator on a device, and of the plain one."""
    found = torch.ops.qsim.accumulate(a, b, torch.tensor(SEED), how, STREAM, OFFSET)
    plain = torch.empty_like(found)
    reference.accumulate_into(plain, a, b, read_sum(how), (torch.tensor(SEED), STREAM, OFFSET))
    return [found, plain]


def lows_of(accumulator: Accumulator, a: Format, b: Format) -> tuple[int, int]:
    """The exponents that subnormal numbers count with; a chunk's unit takes bfloat16 if that holds both operands, or else float16."""
    if isinstance(accumulator, Rounded) or (isinstance(accumulator, Promoted) and isinstance(accumulator.inner, Rounded)):
        narrow = {E4M3, E5M2, BF16}
        return (-126, -126) if {a, b} <= narrow else (-14, -14) if {a, b} <= {E4M3, E5M2, FP16} else (LOWS[a], LOWS[b])
    return LOWS[a], LOWS[b]


def check(accumulator: Accumulator, a: Tensor, b: Tensor, formats: tuple[Format, Format]) -> None:
    """Compare every result with the oracle, bit for bit."""
    how, length = accumulator.spelled(*formats), a.shape[1]
    lows, own = lows_of(accumulator, *formats), indices(accumulator, length)
    rows, columns = a.double().tolist(), b.double().T.tolist()
    wanted = [
        exact_sum(accumulator, row, column, lows, Draw(SEED, STREAM, OFFSET + (i * len(columns) + j) * own))
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
    dtype = torch.float32 if is_single(read_sum(how)) else torch.float64
    expected = torch.tensor(wanted, dtype=torch.float64).to(dtype).view(len(rows), len(columns))
    bits, nan = (torch.int32, 0x7FFFFFFF) if dtype == torch.float32 else (torch.int64, 0x7FFFFFFFFFFFFFFF)
    patterns = torch.where(expected.isnan(), nan, expected.view(bits))
    for found in implementations(a, b, how):
        assert found.dtype == dtype
        assert found.view(bits).tolist() == patterns.tolist(), (accumulator, a, b, found, expected)


def operand(rows: int, columns: int, fmt: Format, spread: float, seed: int) -> Tensor:
    """Numbers of a format, with exponents spread over so many binades, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x *= torch.exp2(torch.randn(rows, columns, generator=generator, dtype=torch.float64) * spread)
    x[torch.rand(rows, columns, generator=generator) < 0.1] = 0.0
    return qsim.quantize(x.float(), fmt)


def taken(accumulator: Accumulator) -> list[Format]:
    """Formats of operands for an accumulator."""
    return list(accumulator.taken or (E4M3, E5M2, BF16, FP16, FP32))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("name", ROUNDED | {f"unit {name}": 0 for name in ALIGNED})
def test_sums_are_those_of_exact_arithmetic(name: str, spread: float) -> None:
    accumulator = ALIGNED[name.removeprefix("unit ")] if name.startswith("unit ") else ROUNDED[name]
    formats = taken(accumulator)
    for seed, length in enumerate((0, 1, 2, 7, 16, 40, 67)):
        pair = formats[seed % len(formats)], formats[(seed + seed // 2) % len(formats)]
        rows, columns = (2, 3) if length < 40 else (1, 2)
        check(accumulator, operand(rows, length, pair[0], spread, seed), operand(length, columns, pair[1], spread, seed + 100), pair)


#: Numbers that arithmetic treats specially, of magnitudes whose products overflow, underflow and cancel.
EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 3.0, 2.0**-149, -(2.0**-130), 2.0**-126, 1.5 * 2.0**127, -(2.0**127), 2.0**64)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150)
def test_any_operands(data: st.DataObject) -> None:
    accumulator = data.draw(st.sampled_from([*ROUNDED.values(), *ALIGNED.values()]))
    pair = data.draw(st.tuples(*[st.sampled_from(taken(accumulator))] * 2))
    length = data.draw(st.integers(0, 36))
    numbers = st.one_of(st.sampled_from(EDGES), st.floats(width=32), st.integers(-40, 40).map(float))
    a, b = (torch.tensor(data.draw(st.lists(numbers, min_size=length, max_size=length))) for _ in range(2))
    left, right = (qsim.quantize(x, fmt, overflow="nonfinite") for x, fmt in zip((a, b), pair, strict=True))
    check(accumulator, left.view(1, length), right.view(length, 1), pair)


@pytest.mark.sampled(3)
@pytest.mark.sampled(12)
@pytest.mark.parametrize("accumulator", [*ROUNDED.values(), *ALIGNED.values()], ids=[*ROUNDED, *(f"unit {name}" for name in ALIGNED)])
def test_special_operands(accumulator: Accumulator) -> None:
    fmt = taken(accumulator)[-1]
    for special in qsim.quantize(torch.tensor([*EDGES, 65504.0, 2.0**-24]), fmt, overflow="nonfinite").tolist():
        a = torch.tensor([[special, 1.0, 0.0], [1.0, special, special], [-1.0, 0.5, -0.0], [special, special, -special]])
        b = torch.tensor([[1.0, special, 0.0, -1.0], [2.0, 1.0, special, 1.0], [0.0, 0.0, -special, special]])
        check(accumulator, a, b, (fmt, fmt))


def test_a_unit_truncates_below_the_largest_product() -> None:
    # 448 * 448 lies between 2**17 and 2**18, of which 14 bits reach down to 16: the sum with 15 is truncated to it.
    a = torch.tensor([[448.0, 15.0, *[0.0] * 30, 15.0, -448.0]])
    b = torch.tensor([448.0, 1.0, *[1.0] * 30, 1.0, 448.0]).view(-1, 1)
    assert qsim.matmul(a, b, "h100_fp8").item() == 0.0
    a[0, 1] = 16.0
    assert qsim.matmul(a, b, "h100_fp8").item() == 16.0


#: Units of NVIDIA's chips, one for each format that they take.
ZEROS = {"h100_bf16": BF16, "a100_bf16": BF16, "b200_bf16": BF16, "h100_fp16": FP16, "h100_tf32": TF32, "h100_fp8": E4M3, "ada_fp8": E5M2}


@pytest.mark.parametrize("name", ZEROS)
def test_a_zero_beside_a_huge_operand_does_not_count(name: str) -> None:
    # Were the exponent of the zero product that of its factors, all others would be truncated away.
    accumulator, fmt = NAMED[name], ZEROS[name]
    largest, least = 2.0 ** math.floor(math.log2(fmt.max)), max(2.0**-25, fmt.smallest)
    a = torch.tensor([[0.0, largest, -0.0, least]])
    b = torch.tensor([[largest], [0.0], [largest], [1.0]])
    for found in implementations(a, b, accumulator.spelled(fmt, fmt)):
        assert found.tolist() == [[least]]
    spread = random_powers((6, 40), fmt, seed=1), random_powers((40, 5), fmt, seed=2)
    check(accumulator, *spread, (fmt, fmt))


def random_powers(shape: tuple[int, int], fmt: Format, seed: int) -> Tensor:
    """Numbers of a format, half of them zeros, the others spread over 120 powers of two or as many as it has."""
    generator = torch.Generator().manual_seed(seed)
    low, high = max(-60, math.ceil(math.log2(fmt.smallest_normal))), min(60, math.floor(math.log2(fmt.max)))
    exponents = torch.randint(low, high + 1, shape, generator=generator)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-1, 1) * exponents.exp2()
    x = torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0, x)
    return qsim.quantize(x, fmt, rounding="toward_zero", dtype=torch.float64).float()


def test_subnormal_operands_count_with_the_smallest_exponent_of_their_format() -> None:
    # 2**-9 * 2**-9 as E4M3: exponent -12, so 13 bits reach down to 2**-25 and 2**-18 is kept; all of it is in E5M2, too.
    for fmt, fraction, kept in (("e4m3", 6, True), ("e4m3", 5, False), ("e5m2", 5, True)):
        unit = Aligned(32, fraction, operands=(fmt,))
        a, b = torch.full((1, 1), 2.0**-9), torch.full((1, 1), 2.0**-9)
        assert (qsim.matmul(a, b, unit).item() != 0) == kept


#: Units of single products, with the operands of a sum and what it must be.
ENDS: dict[str, tuple[Aligned, list[tuple[float, float]], float]] = {
    "from the value after the largest on, a sum is infinite": (Aligned(1, 40, "fp16"), [(256.0, 256.0)], math.inf),
    "a negative one, too": (Aligned(1, 40, "fp16"), [(256.0, -256.0)], -math.inf),
    "also where it is rounded to nearest": (Aligned(1, 40, "fp16", rounding="nearest"), [(256.0, 256.0)], math.inf),
    "a smaller one is truncated": (Aligned(1, 40, "fp16"), [(65535.0, 1.0)], 65504.0),
    "an infinite sum stays so": (Aligned(1, 40, "fp16"), [(256.0, 256.0), (-256.0, 255.0)], math.inf),
    "a subnormal sum counts as the smallest exponent": (Aligned(1, 4, "fp16"), [(2.0**-20, 1.0)] * 2, 0.0),
    "which leaves it what is above": (Aligned(1, 6, "fp16"), [(2.0**-20, 1.0)] * 2, 2.0**-19),
    "an empty sum does not": (Aligned(1, 3), [(2.0**-100, 2.0**-30)], 2.0**-130),
    "but as -133": (Aligned(1, 3), [(2.0**-100, 2.0**-37)], 0.0),
    "or what is not below that": (Aligned(1, 3), [(2.0**-100, 2.0**-36)], 2.0**-136),
}


@pytest.mark.parametrize("name", ENDS)
def test_running_sums_at_both_ends_of_their_format(name: str) -> None:
    unit, pairs, due = ENDS[name]
    a, b = torch.tensor([[x for x, _ in pairs]]), torch.tensor([[y] for _, y in pairs])
    assert [found.tolist() for found in implementations(a, b, unit.spelled(FP32, FP32))] == [[[due]]] * 2
    check(unit, a, b, (FP32, FP32))


def test_a_fused_step_rounds_once() -> None:
    # 2048 + (1 + 2**-10)**2 lies above the middle between 2048 and 2050 in FP16. In float32 the product is rounded to it first.
    a = torch.tensor([[2048.0, 1.0 + 2.0**-20]])
    b = torch.tensor([[1.0], [1.0 + 2.0**-20]])
    assert qsim.matmul(a, b, Rounded("fp16")).item() == 2050.0
    assert qsim.matmul(a, b, Rounded("fp16", product="fp16")).item() == 2048.0


LIBRARY = ctypes.util.find_library("m")


@pytest.mark.skipif(LIBRARY is None, reason="there is no C library of mathematics")
@pytest.mark.parametrize("spread", [0.0, 20.0, 60.0])
def test_a_sum_in_float32_is_a_loop_of_the_c_librarys_fma(spread: float) -> None:
    fma = ctypes.CDLL(LIBRARY).fmaf
    fma.restype, fma.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    a, b = operand(4, 50, FP32, spread, 1), operand(50, 3, FP32, spread, 2)
    found = qsim.matmul(a, b, Rounded("fp32"))
    for i, row in enumerate(a.tolist()):
        for j, column in enumerate(b.T.tolist()):
            total = 0.0
            for x, y in zip(row, column, strict=True):
                total = fma(x, y, total)
            assert found[i, j].item() == total or (math.isnan(total) and found[i, j].isnan())


def test_a_sum_stagnates_unless_it_is_compensated_or_a_tree() -> None:
    a, b = torch.ones(1, 512), torch.ones(512, 1)
    for order, wanted in (("sequential", 256.0), ("pairwise", 512.0), ("kahan", 512.0)):
        results = implementations(a, b, Rounded("bf16", order=order).spelled(BF16, BF16))  # type: ignore[arg-type]
        assert [x.item() for x in results] == [wanted] * 2


def test_stochastic_sums_are_unbiased() -> None:
    a, b = torch.ones(4096, 512), torch.full((512, 1), 0.75)
    found = qsim.matmul(a, b, Rounded("bf16", rounding="stochastic"), seed=1).double()
    # A step's error is below one unit, at most 2, and errors are uncorrelated: five deviations of the mean of 4096 sums.
    assert abs(found.mean().item() - 384.0) < 5 * (512 * 1.0 / 4096) ** 0.5
    assert found.std() > 1


@pytest.mark.parametrize(
    "name",
    [
        "promoted, stochastic",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("stochastic", "pairwise, stochastic", "h100_fp8_promoted")),
    ],
)
def test_results_do_not_depend_on_layout_or_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = (ROUNDED | ALIGNED)[name]
    a, b = operand(6, 34, E4M3, 1.0, 1).view(2, 3, 34), operand(68, 2, E4M3, 1.0, 2).view(2, 34, 2)
    how = accumulator.spelled(E4M3, E4M3)
    whole = implementations(a, b, how)
    turned = implementations(a.mT.contiguous().mT, b.transpose(0, 2).contiguous().transpose(0, 2), how)
    narrow = implementations(a.to(torch.bfloat16), b.to(torch.float8_e4m3fn), how)
    for piece in (1, 7):
        monkeypatch.setattr(reference, "CHUNK", piece)
        assert all(torch.equal(found, whole[0]) for found in [*whole, *turned, *narrow, *implementations(a, b, how)])


def test_a_piece_of_a_result_has_the_bits_of_the_whole() -> None:
    accumulator, a, b = ROUNDED["stochastic"], operand(6, 20, BF16, 1.0, 1), operand(20, 4, BF16, 1.0, 2)
    whole = qsim.matmul(a, b, accumulator, seed=5)
    assert torch.equal(qsim.matmul(a[2:], b, accumulator, seed=Noise(5, offset=2 * 4 * indices(accumulator, 20))), whole[2:])


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 2, 4, 3)])
def test_empty_operands(shape: tuple[int, ...]) -> None:
    *batch, rows, length, columns = shape
    for accumulator in [*ROUNDED.values(), *ALIGNED.values()]:
        found = qsim.matmul(torch.zeros(*batch, rows, length), torch.zeros(*batch, length, columns), accumulator)
        assert found.shape == (*batch, rows, columns)
        assert not found.any()
        assert not found.signbit().any()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["stochastic", "h100_bf16", "fixed, wide"])
def test_the_operator_is_one_for_torch(name: str) -> None:
    how = (ROUNDED | ALIGNED)[name].spelled(BF16, BF16)
    for shapes in (((3, 20), (20, 2)), ((2, 3, 20), (2, 20, 4))):
        a, b = (torch.randn(shape).bfloat16() for shape in shapes)
        torch.library.opcheck(torch.ops.qsim.accumulate.default, (a, b, torch.tensor(1), how, 0, 0))


def test_the_operator_refuses_what_it_cannot_add() -> None:
    how = Rounded("fp16").spelled(BF16, BF16)
    x = torch.zeros(2, 2)
    for a, b in ((x, torch.zeros(3, 2)), (x[0], x), (x, x.view(1, 2, 2)), (x.view(1, 2, 2), torch.zeros(2, 2, 2))):
        with pytest.raises(ValueError, match="cannot multiply shapes"):
            torch.ops.qsim.accumulate(a, b, None, how, 0, 0)
    with pytest.raises(TypeError, match="float32 or narrower floats, got torch\\.float64"):
        torch.ops.qsim.accumulate(x.double(), x, None, how, 0, 0)
    with pytest.raises(ValueError, match=r"bias must have 2 elements in one dimension, got shape \(3,\)"):
        torch.ops.qsim.accumulate(x, x, None, how, 0, 0, bias=torch.zeros(3))
    with pytest.raises(ValueError, match="stochastic rounding needs a seed"):
        torch.ops.qsim.accumulate(x, x, None, Rounded("fp16", rounding="stochastic").spelled(BF16, BF16), 0, 0)
    with pytest.raises(ValueError, match="a sum is spelt 'rounded …'"):
        torch.ops.qsim.accumulate(x, x, None, "summed", 0, 0)
