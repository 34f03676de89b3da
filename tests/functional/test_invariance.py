"""Results depend only on values, logical index and seed, not on strides, device, pieces, chunks, threads or the output tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import qsim
from qsim import Stochastic
from qsim.formats import E4M3
from qsim.random import Noise
from qsim_kernels.torch import chunks
from support import inputs
from support.comparing import raw, same_bits

SHAPE = (4, 6, 5, 7)
STOCHASTIC: dict[str, Any] = {"rounding": "stochastic", "seed": Noise(5, 3)}

#: Roundings with and without noise, for both assignments of random bits.
OPTIONS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "up, nonfinite": {"rounding": "up", "overflow": "nonfinite"},
    "stochastic": STOCHASTIC,
    "stochastic, 6 bits": {"rounding": Stochastic(6, correction=True), "seed": Noise(5, 3, 3)},
    "stochastic, 32 bits": {"rounding": Stochastic(32), "seed": Noise(5, 3, 2**33 + 8)},
}


def every_other(x: Tensor) -> Tensor:
    """Every other column of a larger tensor."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 77.0, dtype=x.dtype, device=x.device)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def window(x: Tensor) -> Tensor:
    """The middle of a larger tensor."""
    wide = torch.full([size + 3 for size in x.shape], 77.0, dtype=x.dtype, device=x.device)
    inside = tuple(slice(1, 1 + size) for size in x.shape)
    wide[inside] = x
    return wide[inside]


def shifted(x: Tensor) -> Tensor:
    """Contiguous, but one element after an aligned address."""
    flat = torch.full((x.numel() + 1,), 77.0, dtype=x.dtype, device=x.device)
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)


#: The same values with different memory layouts.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "permuted": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "every other column": every_other,
    "window": window,
    "shifted": shifted,
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def values(request: pytest.FixtureRequest) -> Tensor:
    """840 values, including all that are difficult for E4M3, on the CPU, contiguous."""
    edges = inputs.edges(E4M3, request.param)
    shuffled = edges[torch.randperm(len(edges), generator=torch.Generator().manual_seed(1))]
    return shuffled.repeat(2)[: 4 * 6 * 5 * 7].clone().view(SHAPE)


def check(result: Tensor, expected: Tensor, like: Tensor) -> None:
    """Compare a result with the expected bits, and its strides with torch's."""
    assert same_bits(result, expected)
    assert result.device == like.device
    assert result.stride() == torch.empty_like(like).stride()


def outside(x: Tensor) -> Tensor:
    """The memory of a view that does not belong to it."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    belongs = torch.zeros(len(whole), dtype=torch.bool, device=x.device)
    belongs.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return whole[~belongs]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("option", OPTIONS)
def test_values_do_not_depend_on_the_layout(values: Tensor, device: torch.device, layout: str, option: str) -> None:
    x = LAYOUTS[layout](values.to(device))
    before, strides = x.clone(), x.stride()
    for dtype in (values.dtype, torch.float32, torch.bfloat16, torch.float16, torch.float64):
        check(qsim.quantize(x, E4M3, dtype=dtype, **OPTIONS[option]), qsim.quantize(values, E4M3, dtype=dtype, **OPTIONS[option]), x)
    assert same_bits(x, before)
    expected = qsim.quantize(values, E4M3, **OPTIONS[option])
    # Into tensors with strides, from others, from itself, and in place.
    out = LAYOUTS[layout](torch.full_like(values, 55.0).to(device))
    for source in (layout, "contiguous", "transposed", "every other column"):
        out.fill_(55.0)
        assert qsim.quantize(LAYOUTS[source](values.to(device)), E4M3, out=out, **OPTIONS[option]) is out
        assert same_bits(out, expected)
    other = LAYOUTS[layout](values.to(device))
    assert qsim.quantize(other, E4M3, out=other, **OPTIONS[option]) is other
    assert qsim.quantize_(x, E4M3, **OPTIONS[option]) is x
    for written in (out, other, x):
        assert same_bits(written, expected)
        assert written.stride() == strides
        assert (outside(written) == 77).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("option", OPTIONS)
def test_codes_do_not_depend_on_the_layout(values: Tensor, device: torch.device, layout: str, option: str) -> None:
    x = LAYOUTS[layout](values.to(device))
    for fmt in ("e4m3", "fp16", "fp32"):
        expected = qsim.encode(values, fmt, **OPTIONS[option])
        check(qsim.encode(x, fmt, **OPTIONS[option]), expected, x)
        laid = LAYOUTS[layout](expected.to(device))
        check(qsim.decode(laid, fmt), qsim.decode(expected, fmt), laid)


@pytest.mark.parametrize("option", OPTIONS)
def test_views_that_hold_their_numbers_negated(values: Tensor, device: torch.device, option: str) -> None:
    # torch.conj is lazy: the imaginary part of its result is a view of memory with the other signs.
    values = values.float()
    whole = torch.complex(torch.full_like(values, 77), -values).to(device)
    x = whole.conj().imag
    assert x.is_neg()
    expected = qsim.quantize(values, E4M3, **OPTIONS[option])
    assert same_bits(qsim.quantize(x, E4M3, **OPTIONS[option]).cpu(), expected)
    out = torch.full_like(whole, 55.0).conj().imag
    assert qsim.quantize(x, E4M3, out=out, **OPTIONS[option]) is out
    assert same_bits(out.cpu(), expected)
    version = x._version
    assert qsim.quantize_(x, E4M3, **OPTIONS[option]) is x
    assert same_bits(x.cpu(), expected)
    assert x._version > version
    assert (whole.real == 77).all()


@pytest.mark.parametrize("option", OPTIONS)
def test_expanded(values: Tensor, device: torch.device, option: str) -> None:
    # One memory location, many logical indices: each has its own noise.
    x = values.to(device)[:1, :, :, 3:4].expand(SHAPE)
    result = qsim.quantize(x, E4M3, **OPTIONS[option])
    check(result, qsim.quantize(x.cpu().contiguous(), E4M3, **OPTIONS[option]), x)
    assert same_bits(qsim.encode(x, E4M3, **OPTIONS[option]).cpu(), qsim.encode(x.cpu().contiguous(), E4M3, **OPTIONS[option]))


@pytest.mark.parametrize("option", OPTIONS)
def test_single_element(device: torch.device, option: str) -> None:
    # 0-d, and dimensions of size one with any strides: all have logical index `offset`.
    number = torch.tensor(0.3, device=device)
    expected = qsim.quantize(torch.tensor([0.3]), E4M3, **OPTIONS[option])[0]
    result = qsim.quantize(number, E4M3, **OPTIONS[option])
    assert result.shape == ()
    assert same_bits(result, expected)
    odd = torch.full((9,), 0.3, device=device).as_strided((1, 1, 1), (7, 3, 5), 4)
    assert same_bits(qsim.quantize(odd, E4M3, **OPTIONS[option]), expected.view(1, 1, 1))
    assert qsim.encode(number, E4M3, **OPTIONS[option]).shape == ()
    assert qsim.decode(qsim.encode(number, E4M3, **OPTIONS[option]), E4M3).item() == expected.item()
    assert qsim.quantize_(number, E4M3, **OPTIONS[option]).item() == expected.item()


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 5)])
@pytest.mark.parametrize("option", OPTIONS)
def test_empty(device: torch.device, shape: tuple[int, ...], option: str) -> None:
    for x in (torch.empty(shape, device=device), torch.empty(shape[::-1], device=device).permute(*range(len(shape))[::-1])):
        result = qsim.quantize(x, E4M3, dtype=torch.bfloat16, **OPTIONS[option])
        assert result.dtype == torch.bfloat16
        assert result.shape == x.shape
        assert result.stride() == torch.empty_like(x).stride()
        assert qsim.quantize_(x, E4M3, **OPTIONS[option]) is x
        out = torch.empty(shape, device=device)
        assert qsim.quantize(x, E4M3, out=out, **OPTIONS[option]) is out
        codes = qsim.encode(x, E4M3, **OPTIONS[option])
        assert codes.shape == x.shape
        assert codes.dtype == torch.uint8
        assert qsim.decode(codes, E4M3).shape == x.shape


@pytest.mark.parametrize("bits", [None, 1, 6, 16, 17, 32])
@pytest.mark.parametrize("offset", [0, 5, 2**32 - 500])
def test_pieces_with_offset_make_the_whole(values: Tensor, device: torch.device, bits: int | None, offset: int) -> None:
    rounding = Stochastic(bits)
    flat = values.reshape(-1)
    expected = qsim.quantize(flat, E4M3, rounding, seed=Noise(-5, 2**40, offset))
    expected_codes = qsim.encode(flat, E4M3, rounding, seed=Noise(-5, 2**40, offset))
    x = flat.to(device)
    for cuts in ([1], [3, 4, 5], [8, 17, 400], list(range(0, 100, 7)), [839]):
        starts = [0, *(cut for cut in cuts if cut)]
        pieces = list(zip(starts, [*starts[1:], len(x)], strict=True))
        parts = [qsim.quantize(x[a:b], E4M3, rounding, seed=Noise(-5, 2**40, offset + a)) for a, b in pieces]
        assert same_bits(torch.cat(parts), expected)
        codes = [qsim.encode(x[a:b], E4M3, rounding, seed=Noise(-5, 2**40, offset + a)) for a, b in pieces]
        assert same_bits(torch.cat(codes), expected_codes)
        in_place = x.clone()
        for a, b in pieces:
            qsim.quantize_(in_place[a:b], E4M3, rounding, seed=Noise(-5, 2**40, offset + a))
        assert same_bits(in_place, expected)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set how many elements the reference processes at a time."""
    return lambda size: monkeypatch.setattr(chunks, "CHUNK", size)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [1, 7, 34])
@pytest.mark.parametrize("option", ["nearest", "stochastic", "stochastic, 6 bits"])
def test_chunks_leave_no_trace(values: Tensor, small_chunks: Callable[[int], None], size: int, option: str) -> None:
    part = values[:2, :3]
    views = {name: layout(part) for name, layout in LAYOUTS.items()}
    views["flat"] = part.reshape(-1)
    views["expanded"] = part[:1].expand(part.shape)
    whole = {name: qsim.quantize(x, E4M3, **OPTIONS[option]) for name, x in views.items()}
    codes = {name: qsim.encode(x, E4M3, **OPTIONS[option]) for name, x in views.items()}
    small_chunks(size)
    for name, x in views.items():
        assert same_bits(qsim.quantize(x, E4M3, **OPTIONS[option]), whole[name]), name
        assert same_bits(qsim.encode(x, E4M3, **OPTIONS[option]), codes[name]), name
        assert same_bits(qsim.decode(codes[name], E4M3, dtype=x.dtype), whole[name]), name


@given(st.data())
def test_any_strides(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), "shape")
    order = data.draw(st.permutations(range(len(shape))), "order in memory")
    steps = [data.draw(st.integers(1, 3), "step") for _ in shape]
    option = OPTIONS[data.draw(st.sampled_from(sorted(OPTIONS)), "option")]
    strides, span = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = span * steps[dim]
        span = strides[dim] * shape[dim]
    memory = inputs.random_patterns(torch.float32, span + 2, seed=span)
    x = memory.as_strided(shape, strides, 2)
    before = chunks.CHUNK
    try:
        chunks.CHUNK = data.draw(st.sampled_from([1, 3, 8, before]), "chunk")
        result = qsim.quantize(x, "e5m2", **option)
    finally:
        chunks.CHUNK = before
    check(result, qsim.quantize(x.contiguous(), "e5m2", **option), x)


@pytest.mark.gpu
@pytest.mark.slow
class TestMoreThanTwoToThe31Elements:
    COUNT = 3 * (2**31 // 3 + 20001)

    #: Positions where a 32-bit index would wrap: the start, 2**31, the end.
    PLACES = (0, 2**30 - 64, 2**31 - 64, COUNT - 1000)

    @pytest.fixture(autouse=True)
    def _room(self) -> Iterator[None]:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < 40 * 2**30:
            pytest.skip("needs 40 GiB of GPU memory")
        yield
        torch.cuda.empty_cache()

    @pytest.fixture
    def x(self) -> Tensor:
        return torch.empty(self.COUNT, dtype=torch.bfloat16, device="cuda").normal_(generator=torch.Generator("cuda").manual_seed(1))

    @pytest.mark.parametrize("option", OPTIONS)
    def test_quantize_and_encode(self, x: Tensor, option: str) -> None:
        options = OPTIONS[option]
        noise = options.get("seed", Noise())
        result, codes = qsim.quantize(x, E4M3, **options), qsim.encode(x, E4M3, **options)
        for place in self.PLACES:
            part = x[place : place + 1000].cpu()
            alone = {**options, "seed": noise._replace(offset=noise.offset + place)} if "seed" in options else options
            assert same_bits(result[place : place + 1000], qsim.quantize(part, E4M3, **alone))
            assert same_bits(codes[place : place + 1000], qsim.encode(part, E4M3, **alone))
        # All other elements are values of the format: none was left out.
        assert torch.equal(raw(qsim.decode(codes, E4M3, dtype=torch.bfloat16)), raw(result))

    def test_strides(self, x: Tensor) -> None:
        view = x.view(-1, 3).t()
        result = qsim.quantize(view, E4M3, **STOCHASTIC)
        assert result.stride() == torch.empty_like(view).stride()
        columns = view.shape[1]
        for row, column in ((0, 0), (2, columns - 500), (2, 2**31 - 2 * columns - 100)):
            part = view[row, column : column + 500].cpu()
            assert same_bits(
                result[row, column : column + 500], qsim.quantize(part, E4M3, "stochastic", seed=Noise(5, 3, row * columns + column))
            )
