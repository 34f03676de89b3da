"""Iteration of the Triton kernels over a tensor: random words per element, block sizes, counts, strides, and compiled variants."""

from __future__ import annotations

import pytest
import torch

import qsim
from qsim import Stochastic, rounding as roundings
from qsim.formats import E2M1, E4M3, Float, Format
from qsim.random import Noise
from qsim_kernels import torch as reference
from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import GridRounding
from support import inputs
from support.comparing import first_difference, same_bits
from support.random123 import ANSWERS
from support.side_by_side import DEVICE, both_quantized, dealt, difficult, options, rule, seed

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from qsim_kernels import triton as kernels  # noqa: E402
from qsim_kernels.triton.device.noise import words  # noqa: E402

BITS = (None, 1, 6, 16, 17, 32)

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("correction", [False, True])
def test_noise_depends_on_seed_stream_and_index(dtype: torch.dtype, bits: int | None, correction: bool) -> None:
    how = rule(Stochastic(bits, correction), "saturate")
    x = torch.linspace(-3, 3, 501, device=DEVICE).to(dtype)
    # Small numbers come first: kernels compiled for them must also work for the large ones.
    settings = [
        (1, 1, 0),
        (0, 0, 1),
        (-1, 2**63 - 1, 3),
        (2**63 - 1, -1, 4),
        (-(2**63), -(2**63), 8),
        (2**32, 2**32, 13),
        (3, 7, 2**31 - 250),
        (3, 7, 2**35 - 251),
        (3, 7, 2**62 + 5),
    ]
    for number, stream, offset in dealt(settings, BITS.index(bits) + correction + (dtype == torch.bfloat16), 3):
        a, b = both_quantized(x, E4M3, how, None, number, stream, offset)
        assert same_bits(a, b), f"seed {number}, stream {stream}, offset {offset}: {first_difference(x, a, b)}"
        if DEVICE.type == "cuda":
            there = torch.empty_like(x)
            kernels.quantize_into(there, x, GridRounding(E4M3.grid, how), (seed(number).cuda(), stream, offset))
            assert same_bits(there, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("offset", [0, 3])
def test_later_random_bits_decide_where_the_first_do_not(dtype: torch.dtype, offset: int) -> None:
    # Numbers near zero whose rounding is not determined by the first 16 bits of their index, if the dtype has such numbers.
    fmt, count = qsim.Int(8) if dtype == torch.float16 else E4M3, 16000
    bits = qsim.random.random_bits(count, 32, seed=5, stream=7, offset=offset)
    exact = (0xFFFF - (bits >> 16) + 0.5) * 2.0**-16 * fmt.smallest
    x = torch.where(exact.to(dtype) == exact, exact, 0.0).to(dtype).to(DEVICE)
    expected = torch.where((x.cpu() != 0) & (bits & 0xFFFF >= 2**15), fmt.smallest, 0.0)
    assert (expected != 0).sum() > 4
    a, b = both_quantized(x, fmt, rule("stochastic", "saturate"), None, 5, 7, offset)
    assert same_bits(a.cpu().to(torch.float64), expected.to(torch.float64))
    assert same_bits(a, b), first_difference(x, a, b)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", inputs.DTYPES)
@pytest.mark.parametrize("offset", [0, 5])
def test_words_go_to_the_same_elements_whatever_is_read_and_written(source: torch.dtype, offset: int) -> None:
    # The number of neighbours per thread depends on the narrower type, and so does the order in which it generates random words.
    x = torch.linspace(-3, 3, 501, device=DEVICE, dtype=torch.float64).to(source)
    for number, bits in enumerate((6, 16, 17, 32)):
        how = rule(Stochastic(bits), "saturate")
        first = torch.empty_like(x, dtype=torch.float64)
        reference.quantize_into(first, x, GridRounding(E4M3.grid, how), (seed(), 3, offset))
        assert first.unique().numel() > 80
        for target in dealt(inputs.DTYPES, inputs.DTYPES.index(source) + number + offset, 2):
            out = torch.full_like(x, 77, dtype=target)
            kernels.quantize_into(out, x, GridRounding(E4M3.grid, how), (seed(), 3, offset), **options(kernels, x.numel()))
            assert same_bits(out, first.to(target)), (bits, target)
        codes = torch.full_like(x, 99, dtype=torch.uint8)
        kernels.encode_into(codes, x, Encoding(E4M3.grid, how, E4M3.coding), (seed(), 3, offset), **options(kernels, x.numel()))
        assert same_bits(qsim.decode(codes, E4M3, dtype=torch.float64), first), bits


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("offset", [0, 5])
def test_block_size_leaves_no_trace(number: int, offset: int) -> None:
    block = (64, 256, 1024, 4096)[number]
    for dtype in dealt((torch.float32, torch.bfloat16), number + offset, 2):
        x = difficult(E4M3, dtype)[:333]
        for rounding in ("nearest", "stochastic", Stochastic(6), Stochastic(32)):
            how = rule(rounding, "saturate")
            values, expected = torch.empty_like(x), torch.empty_like(x)
            reference.quantize_into(expected, x, GridRounding(E4M3.grid, how), (seed(), 3, offset))
            kernels.quantize_into(values, x, GridRounding(E4M3.grid, how), (seed(), 3, offset), block=block)
            assert same_bits(values, expected), rounding
        codes = torch.empty_like(x, dtype=torch.uint8)
        kernels.encode_into(codes, x, Encoding(E4M3.grid, how, E4M3.coding), (seed(), 3, offset), block=block)
        kernels.decode_into(values, codes, E4M3.grid, E4M3.coding, block=block)
        assert same_bits(values, expected)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", Stochastic(6)], ids=str)
def test_any_count_and_no_write_beyond_the_end(rounding: str | roundings.Rounding) -> None:
    # A count of 1 or a multiple of 16 comes first: a kernel compiled for it must also work for the others.
    memory = torch.randn(3000, device=DEVICE)
    how = rule(rounding, "saturate")
    whole = torch.empty_like(memory)
    reference.quantize_into(whole, memory, GridRounding(E4M3.grid, how), (seed(), 0, 0))
    for count in dealt((1, 16, 2048, 2, 7, 15, 17, 1023, 1024, 1025, 2999), len(str(rounding)), 2):
        out = torch.full((3000,), 77.0, device=DEVICE)
        kernels.quantize_into(out[:count], memory[:count], GridRounding(E4M3.grid, how), (seed(), 0, 0), block=1024)
        assert same_bits(out[:count], whole[:count])
        assert (out[count:] == 77).all()
        codes = torch.full((3000,), 99, dtype=torch.uint8, device=DEVICE)
        kernels.encode_into(codes[:count], memory[:count], Encoding(E4M3.grid, how, E4M3.coding), (seed(), 0, 0), block=1024)
        assert (codes[count:] == 99).all()
        out.fill_(77.0)
        kernels.decode_into(out[:count], codes[:count], E4M3.grid, E4M3.coding, block=1024)
        assert same_bits(out[:count], whole[:count])
        assert (out[count:] == 77).all()


def test_nothing_to_do() -> None:
    x = torch.empty(0, 3, device=DEVICE)
    how = rule("stochastic", "saturate")
    kernels.quantize_into(torch.empty_like(x), x, GridRounding(E2M1.grid, how), (seed(), 0, 0))
    codes = torch.empty_like(x, dtype=torch.uint8)
    assert not kernels.encode_into(codes, x, Encoding(E2M1.grid, how, E2M1.coding), (seed(), 0, 0))
    kernels.decode_into(x, codes, E2M1.grid, E2M1.coding)


def test_strides_and_alignment() -> None:
    x = difficult(E4M3, torch.float32)[:900].view(30, 30)
    how = rule("stochastic", "saturate")
    expected = torch.empty_like(x)
    reference.quantize_into(expected, x, GridRounding(E4M3.grid, how), (seed(), 0, 0))
    sources = [x, x.t().contiguous().t(), torch.cat([x[:1], x])[1:], torch.cat([x.view(-1)[:1], x.view(-1)])[1:].view(30, 30)]
    for source in sources:
        wide = torch.full((30, 62), 77.0, device=DEVICE)
        for out in (wide[:, 1::2][:, :30], wide.view(-1)[1:901].view(30, 30), wide[:, :30].t()):
            wide.fill_(77.0)
            kernels.quantize_into(out, source, GridRounding(E4M3.grid, how), (seed(), 0, 0), **options(kernels, x.numel()))
            assert same_bits(out, expected)
            assert int((wide == 77).sum()) == wide.numel() - 900
            codes = torch.full((30, 62), 99, dtype=torch.uint8, device=DEVICE)
            written = codes.as_strided(out.shape, out.stride(), out.storage_offset())
            kernels.encode_into(written, source, Encoding(E4M3.grid, how, E4M3.coding), (seed(), 0, 0), **options(kernels, x.numel()))
            assert int((codes == 99).sum() - (written == 99).sum()) == codes.numel() - 900
            out.fill_(0)
            kernels.decode_into(out, written, E4M3.grid, E4M3.coding, **options(kernels, x.numel()))
            assert same_bits(out, expected)
    in_place = x.clone()
    kernels.quantize_into(in_place, in_place, GridRounding(E4M3.grid, how), (seed(), 0, 0), **options(kernels, x.numel()))
    assert same_bits(in_place, expected)


@triton.jit
def words_kernel(blocks, seeds, streams, out):  # type: ignore[no-untyped-def]
    """Write the four words of each block into a row."""
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
        qsim.quantize(x, fmt, rounding="stochastic", seed=Noise(number, stream, offset))
        if fmt.bits <= 8:  # wider codes have another dtype, which is another kernel
            qsim.decode(qsim.encode(x, fmt, check=False), fmt)

    work(Float(4, 3, specials="none"), 1, 0, 0, 1000)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told["repr"]))
    for exponent, mantissa in ((2, 1), (3, 2), (4, 4), (5, 2), (5, 10)):
        for number, stream, offset, count in ((0, 1, 8, 16), (2**62, -1, 2**40, 1), (-5, 16, 16, 4097)):
            work(Float(exponent, mantissa), number, stream, offset, count)
    assert compiled == []
