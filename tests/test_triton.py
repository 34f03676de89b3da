"""The Triton kernels against the reference, bit for bit: compiled where there is a GPU, else on the CPU through Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import inputs
import qsim
from catalogue import VARIETY
from comparing import first_difference, raw, same_bits
from qsim import Stochastic, rounding as roundings
from qsim.formats import BF16, E2M1, E4M3, E4M3FNUZ, E5M2, E8M0, FP16, FP32, Fixed, Float, Format, Int, PowerOfTwo, holds
from qsim_kernels import Rule, reference
from random123 import ANSWERS

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from qsim_kernels import triton as kernels  # noqa: E402
from qsim_kernels.triton.noise import words  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: The interpreter's time goes by blocks, not by elements: few large ones there, on a GPU what the kernels choose themselves.
BLOCK = None if DEVICE.type == "cuda" else 1 << 14

ROUNDINGS: tuple[str | roundings.Rounding, ...] = (
    *roundings.NAMED,
    Stochastic(1),
    Stochastic(6),
    Stochastic(7, correction=True),
    Stochastic(16, correction=True),
    Stochastic(17),
    Stochastic(32, correction=True),
)

#: Every kind of grid: all specials, no mantissa, no subnormals, no sign, no zero, even steps, wider than float32's range.
FORMATS: tuple[Format, ...] = (
    E4M3,
    E5M2,
    E2M1,
    E4M3FNUZ,
    FP16,
    BF16,
    FP32,
    E8M0,
    PowerOfTwo(5, bias=20),
    Float(4, 0),
    Float(3, 0, specials="ieee"),
    Float(8, 0),
    Float(1, 3, specials="ieee"),
    Float(4, 3, subnormals=False),
    Float(5, 2, specials="ieee", subnormals=False),
    Float(5, 3, specials="ieee", signed=False),
    Float(2, 2, signed=False, subnormals=False),
    Float(4, 3, bias=60),
    Float(8, 23, bias=140),
    Int(8),
    Int(8, signed=False),
    Int(1),
    Int(32),
    Fixed(8, 4, symmetric=True),
    Fixed(24, 23),
)

CASES = [pytest.param(fmt, dtype, id=f"{fmt!r}-{dtype}") for fmt in FORMATS for dtype in inputs.DTYPES if holds(dtype, fmt)]

# The interpreter computes with NumPy, which warns of NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def rule(rounding: str | roundings.Rounding, overflow: str, dtype: torch.dtype) -> Rule:
    """A rounding for tensors of a dtype, as the numbers that kernels take."""
    return roundings.resolve(rounding).rule(overflow, 32 if dtype.itemsize > 2 else 16)


def code_dtype(fmt: Format) -> torch.dtype:
    """What a format's codes come in."""
    return torch.uint8 if fmt.bits <= 8 else torch.int16 if fmt.bits <= 16 else torch.int32


def difficult(fmt: Format, dtype: torch.dtype) -> Tensor:
    """Some thousands of numbers at which rounding may go wrong, in no order that the noise could follow; their count is odd."""
    parts = [inputs.edges(fmt, dtype, count=96), inputs.random_patterns(dtype, 512, seed=2)]
    if dtype == torch.float64 and fmt.precision <= 23:
        parts.append(inputs.double_rounding(fmt, count=96))
    x = torch.cat(parts)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    return x[: len(x) - 1 + len(x) % 2].to(DEVICE)


def seed(number: int = 1234567890123) -> Tensor:
    """A seed as the operators pass it."""
    return torch.tensor(number)


def options(module: Any) -> dict[str, int]:
    """What the kernels are told in addition."""
    return {"block": BLOCK} if module is kernels and BLOCK else {}


def both_quantized(
    x: Tensor, fmt: Format, how: Rule, dtype: torch.dtype | None = None, number: int = 3**25, stream: int = 5, offset: int = 16
) -> tuple[Tensor, Tensor]:
    """Rounds with the reference and with the kernels."""
    results = []
    for module in (reference, kernels):
        out = torch.full_like(x, 77, dtype=dtype)
        module.quantize_into(out, x, seed(number), fmt.grid, how, stream, offset, **options(module))
        results.append(out)
    return results[0], results[1]


def both_encoded(x: Tensor, fmt: Format, how: Rule) -> tuple[Tensor, Tensor, bool, bool]:
    """Rounds and writes codes, with the reference and with the kernels; and whether they say that a NaN was lost."""
    results, lost = [], []
    for module in (reference, kernels):
        out = torch.full_like(x, 77, dtype=code_dtype(fmt))
        lost.append(bool(module.encode_into(out, x, seed(), fmt.grid, how, fmt.coding, 5, 16, **options(module))))
        results.append(out)
    return results[0], results[1], lost[0], lost[1]


def both_decoded(codes: Tensor, fmt: Format, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Reads codes with the reference and with the kernels."""
    results = []
    for module in (reference, kernels):
        out = torch.full_like(codes, 77, dtype=dtype)
        module.decode_into(out, codes, fmt.grid, fmt.coding, **options(module))
        results.append(out)
    return results[0], results[1]


@pytest.mark.parametrize(("fmt", "dtype"), CASES)
def test_quantize(fmt: Format, dtype: torch.dtype) -> None:
    x = difficult(fmt, dtype)
    for overflow in ("saturate", "nonfinite"):
        for rounding in ROUNDINGS:
            a, b = both_quantized(x, fmt, rule(rounding, overflow, dtype))
            assert not first_difference(x, a, b), f"{rounding}, {overflow}: {first_difference(x, a, b)}"


@pytest.mark.parametrize("source", inputs.DTYPES)
@pytest.mark.parametrize(
    ("fmt", "target"),
    [(fmt, dtype) for fmt in (E4M3, Float(4, 0), Int(8), FP16) for dtype in inputs.DTYPES if holds(dtype, fmt)],
    ids=repr,
)
def test_into_another_dtype(fmt: Format, source: torch.dtype, target: torch.dtype) -> None:
    x = difficult(fmt, source)
    for overflow in ("saturate", "nonfinite"):
        for rounding in ("nearest", "down", "stochastic", Stochastic(6)):
            a, b = both_quantized(x, fmt, rule(rounding, overflow, source), target)
            assert not first_difference(x, a, b), f"{rounding}, {overflow}: {first_difference(x, a, b)}"


@pytest.mark.parametrize(("fmt", "dtype"), CASES)
def test_encode(fmt: Format, dtype: torch.dtype) -> None:
    x = difficult(fmt, dtype)
    for given, has_nan in ((x, True), (x[~x.isnan()], False)):
        for overflow in ("saturate", "nonfinite"):
            for rounding in ("nearest", "odd", "stochastic"):
                a, b, lost, also_lost = both_encoded(given, fmt, rule(rounding, overflow, dtype))
                assert not first_difference(given, a, b), f"{rounding}, {overflow}: {first_difference(given, a, b)}"
                assert lost == also_lost
                # Overflow makes NaN too, where there is no infinity.
                if has_nan or overflow == "saturate":
                    assert lost == (has_nan and not fmt.has_nan)


DECODED = list(dict.fromkeys([*FORMATS, *(fmt for fmt in VARIETY if fmt.bits <= 16)]))


def check_decode(codes: Tensor, fmt: Format) -> None:
    """Reads codes into every dtype that holds the format."""
    for dtype in inputs.DTYPES:
        if holds(dtype, fmt):
            a, b = both_decoded(codes.to(code_dtype(fmt)), fmt, dtype)
            assert not first_difference(codes, a, b), f"{dtype}: {first_difference(codes, a, b)}"


@pytest.mark.parametrize("fmt", DECODED, ids=repr)
def test_decode_every_code(fmt: Format) -> None:
    codes = torch.arange(2 ** min(fmt.bits, 16), device=DEVICE)
    if fmt.bits > 16:
        upper = codes << (fmt.bits - 16)
        codes = torch.cat([codes, upper, upper + 12345, (1 << fmt.bits) - 1 - codes])
    check_decode(codes, fmt)


@pytest.mark.parametrize("fmt", [fmt for fmt in DECODED if fmt.bits not in (8, 16, 32)], ids=repr)
def test_decode_ignores_what_stands_above_a_code(fmt: Format) -> None:
    check_decode(torch.arange(2 ** (16 if fmt.bits <= 16 else 20), device=DEVICE) << (fmt.bits - 8 if fmt.bits > 16 else 0), fmt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 1, 6, 16, 17, 32])
@pytest.mark.parametrize("correction", [False, True])
def test_noise_depends_on_seed_stream_and_index(dtype: torch.dtype, bits: int | None, correction: bool) -> None:
    how = rule(Stochastic(bits, correction), "saturate", dtype)
    x = torch.linspace(-3, 3, 501, device=DEVICE).to(dtype)
    # Small numbers come first: what is compiled for them must serve the large ones too.
    for number, stream, offset in (
        (1, 1, 0),
        (0, 0, 1),
        (-1, 2**63 - 1, 3),
        (2**63 - 1, -1, 4),
        (-(2**63), -(2**63), 8),
        (2**32, 2**32, 13),
        (3, 7, 2**31 - 250),
        (3, 7, 2**35 - 251),
        (3, 7, 2**62 + 5),
    ):
        a, b = both_quantized(x, E4M3, how, None, number, stream, offset)
        assert same_bits(a, b), f"seed {number}, stream {stream}, offset {offset}: {first_difference(x, a, b)}"
        if DEVICE.type == "cuda":
            there = torch.empty_like(x)
            kernels.quantize_into(there, x, seed(number).cuda(), E4M3.grid, how, stream, offset)
            assert same_bits(there, b)


@pytest.mark.parametrize("source", inputs.DTYPES)
@pytest.mark.parametrize("offset", [0, 5])
def test_words_go_to_the_same_elements_whatever_is_read_and_written(source: torch.dtype, offset: int) -> None:
    # How many neighbours a thread holds depends on the narrower of the two types, and so does the order in which it makes random words.
    x = torch.linspace(-3, 3, 501, device=DEVICE, dtype=torch.float64).to(source)
    for bits in (6, 16, 17, 32):
        how = rule(Stochastic(bits), "saturate", source)
        first = torch.empty_like(x, dtype=torch.float64)
        reference.quantize_into(first, x, seed(), E4M3.grid, how, 3, offset)
        assert first.unique().numel() > 80
        for target in inputs.DTYPES:
            out = torch.full_like(x, 77, dtype=target)
            kernels.quantize_into(out, x, seed(), E4M3.grid, how, 3, offset, **options(kernels))
            assert same_bits(out, first.to(target)), (bits, target)
        codes = torch.full_like(x, 99, dtype=torch.uint8)
        kernels.encode_into(codes, x, seed(), E4M3.grid, how, E4M3.coding, 3, offset, **options(kernels))
        assert same_bits(qsim.decode(codes, E4M3, dtype=torch.float64), first), bits


@pytest.mark.parametrize("block", [64, 256, 1024, 4096])
@pytest.mark.parametrize("offset", [0, 5])
def test_block_size_leaves_no_trace(block: int, offset: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = difficult(E4M3, dtype)[:777]
        for rounding in ("nearest", "stochastic", Stochastic(6), Stochastic(32)):
            how = rule(rounding, "saturate", dtype)
            values, expected = torch.empty_like(x), torch.empty_like(x)
            reference.quantize_into(expected, x, seed(), E4M3.grid, how, 3, offset)
            kernels.quantize_into(values, x, seed(), E4M3.grid, how, 3, offset, block=block)
            assert same_bits(values, expected), rounding
        codes = torch.empty_like(x, dtype=torch.uint8)
        kernels.encode_into(codes, x, seed(), E4M3.grid, how, E4M3.coding, 3, offset, block=block)
        kernels.decode_into(values, codes, E4M3.grid, E4M3.coding, block=block)
        assert same_bits(values, expected)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", Stochastic(6)], ids=str)
def test_any_count_and_nothing_behind_it(rounding: str | roundings.Rounding) -> None:
    # A count of 1 or of a multiple of 16 comes first: a kernel that is compiled for it must serve the others too.
    memory = torch.randn(3000, device=DEVICE)
    how = rule(rounding, "saturate", torch.float32)
    whole = torch.empty_like(memory)
    reference.quantize_into(whole, memory, seed(), E4M3.grid, how, 0, 0)
    for count in (1, 16, 2048, 2, 7, 15, 17, 1023, 1024, 1025, 2999):
        out = torch.full((3000,), 77.0, device=DEVICE)
        kernels.quantize_into(out[:count], memory[:count], seed(), E4M3.grid, how, 0, 0, block=1024)
        assert same_bits(out[:count], whole[:count])
        assert (out[count:] == 77).all()
        codes = torch.full((3000,), 99, dtype=torch.uint8, device=DEVICE)
        kernels.encode_into(codes[:count], memory[:count], seed(), E4M3.grid, how, E4M3.coding, 0, 0, block=1024)
        assert (codes[count:] == 99).all()
        out.fill_(77.0)
        kernels.decode_into(out[:count], codes[:count], E4M3.grid, E4M3.coding, block=1024)
        assert same_bits(out[:count], whole[:count])
        assert (out[count:] == 77).all()


def test_nothing_to_do() -> None:
    x = torch.empty(0, 3, device=DEVICE)
    how = rule("stochastic", "saturate", torch.float32)
    kernels.quantize_into(torch.empty_like(x), x, seed(), E2M1.grid, how, 0, 0)
    codes = torch.empty_like(x, dtype=torch.uint8)
    assert not kernels.encode_into(codes, x, seed(), E2M1.grid, how, E2M1.coding, 0, 0)
    kernels.decode_into(x, codes, E2M1.grid, E2M1.coding)


def test_strides_and_alignment() -> None:
    x = difficult(E4M3, torch.float32)[:900].view(30, 30)
    how = rule("stochastic", "saturate", torch.float32)
    expected = torch.empty_like(x)
    reference.quantize_into(expected, x, seed(), E4M3.grid, how, 0, 0)
    sources = [x, x.t().contiguous().t(), torch.cat([x[:1], x])[1:], torch.cat([x.view(-1)[:1], x.view(-1)])[1:].view(30, 30)]
    for source in sources:
        wide = torch.full((30, 62), 77.0, device=DEVICE)
        for out in (wide[:, 1::2][:, :30], wide.view(-1)[1:901].view(30, 30), wide[:, :30].t()):
            wide.fill_(77.0)
            kernels.quantize_into(out, source, seed(), E4M3.grid, how, 0, 0, **options(kernels))
            assert same_bits(out, expected)
            assert int((wide == 77).sum()) == wide.numel() - 900
            codes = torch.full((30, 62), 99, dtype=torch.uint8, device=DEVICE)
            written = codes.as_strided(out.shape, out.stride(), out.storage_offset())
            kernels.encode_into(written, source, seed(), E4M3.grid, how, E4M3.coding, 0, 0, **options(kernels))
            assert int((codes == 99).sum() - (written == 99).sum()) == codes.numel() - 900
            out.fill_(0)
            kernels.decode_into(out, written, E4M3.grid, E4M3.coding, **options(kernels))
            assert same_bits(out, expected)
    in_place = x.clone()
    kernels.quantize_into(in_place, in_place, seed(), E4M3.grid, how, 0, 0, **options(kernels))
    assert same_bits(in_place, expected)


@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
def test_zero_where_there_is_none(overflow: str) -> None:
    # Both zeros count as 0 and become the smallest power of two; what is below zero is not a number unless it saturates.
    x = torch.tensor([0.0, -0.0, -(2.0**-149), -1.0, -torch.inf, 2.0**-149], device=DEVICE)
    fmt = PowerOfTwo(5)
    least = fmt.smallest
    for rounding in ROUNDINGS:
        infinite = least if overflow == "saturate" else torch.nan
        # As IEEE has it, a directed rounding that leads back into the range stays there, from finite values.
        below = least if rounding in ("toward_zero", "up") else infinite
        expected = torch.tensor([least, least, below, below, infinite, least], device=DEVICE)
        a, b = both_quantized(x, fmt, rule(rounding, overflow, torch.float32))
        assert torch.equal(a.nan_to_num(-1), expected.nan_to_num(-1)), rounding
        assert same_bits(a, b), rounding


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_every_nan_comes_out_the_same(dtype: torch.dtype) -> None:
    x = inputs.nans(dtype).repeat(3).to(DEVICE)
    for fmt in (E4M3, Float(4, 0), E5M2, Int(8), Float(4, 3, subnormals=False), Fixed(8, 4, symmetric=True)):
        for overflow in ("saturate", "nonfinite"):
            for rounding in ROUNDINGS:
                a, b = both_quantized(x, fmt, rule(rounding, overflow, dtype), offset=1)
                positive = torch.iinfo(raw(x).dtype).max
                assert (raw(a) == positive).all(), (fmt, rounding)
                assert (raw(b) == positive).all(), (fmt, rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["nearest", "nearest_up", "stochastic"])
@pytest.mark.parametrize("fmt", [E4M3, Float(3, 0), Int(5)], ids=repr)
def test_all_numbers_of_16_bits(fmt: Format, rounding: str, dtype: torch.dtype) -> None:
    x = inputs.every_pattern(dtype).to(DEVICE)
    a, b = both_quantized(x, fmt, rule(rounding, "nonfinite", dtype))
    assert not first_difference(x, a, b), first_difference(x, a, b)


@triton.jit
def words_kernel(blocks, seeds, streams, out):  # type: ignore[no-untyped-def]
    """Writes the four words of each block into a row."""
    place = tl.arange(0, 4)
    row = tl.program_id(0)
    a, b, c, d = words(tl.load(blocks + row + place * 0), tl.load(seeds + row), tl.load(streams + row))
    chosen = tl.where(place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d))
    tl.store(out + row * 4 + place, chosen.to(tl.int64))


def test_known_answers() -> None:
    numbers = [torch.tensor([getattr(answer, name) for answer in ANSWERS], device=DEVICE) for name in ("block", "seed", "stream")]
    out = torch.empty(len(ANSWERS), 4, dtype=torch.int64, device=DEVICE)
    words_kernel[(len(ANSWERS),)](*numbers, out)
    assert out.tolist() == [list(answer.words) for answer in ANSWERS]


@pytest.mark.gpu
def test_sweep_over_formats_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(fmt: Format, number: int, stream: int, offset: int, count: int) -> None:
        x = torch.randn(count, device="cuda")
        qsim.quantize(x, fmt)
        qsim.quantize(x, fmt, rounding="stochastic", seed=number, stream=stream, offset=offset)
        if fmt.bits <= 8:  # wider codes are of another dtype, which is another kernel
            qsim.decode(qsim.encode(x, fmt, check=False), fmt)

    work(Float(4, 3), 1, 0, 0, 1000)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told["repr"]))
    for exponent, mantissa in ((2, 1), (3, 2), (4, 4), (5, 2), (5, 10)):
        for number, stream, offset, count in ((0, 1, 8, 16), (2**62, -1, 2**40, 1), (-5, 16, 16, 4097)):
            work(Float(exponent, mantissa), number, stream, offset, count)
    assert compiled == []
