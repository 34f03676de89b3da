"""Tensors that kernels process in place: how they are recognized, and that every element gets the bits of its logical index."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from qsim import Stochastic
from qsim.formats import BF16, E2M1, E4M3, E4M3FNUZ, E5M2, FP16, FP32, Format, Int
from qsim_kernels import torch as reference
from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import GridRounding
from support.comparing import first_difference, raw
from support.inputs import code_dtype
from support.side_by_side import DEVICE, dealt, difficult, rule, seed

pytest.importorskip("triton")

import triton
import triton.language as tl

from qsim_kernels import triton as kernels
from qsim_kernels.triton.device.parts import places_of
from qsim_kernels.triton.host.layouts import ElementOrder, Transposed, launch_layout, memory_of, tile_of
from qsim_kernels.triton.quantize import launch

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

#: Tensors of transposed matrices, with the rows and columns of these.
TRANSPOSED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], Transposed]] = {
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), (2, 70, 6, 8), Transposed(48, 70)),
    "channels last, whole tiles": (lambda x: x.contiguous(memory_format=torch.channels_last), (2, 64, 8, 8), Transposed(64, 64)),
    "channels last, pairs of them": (lambda x: x.contiguous(memory_format=torch.channels_last), (2, 80, 6, 8), Transposed(48, 80)),
    "channels last, three of them": (lambda x: x.contiguous(memory_format=torch.channels_last), (3, 3, 9, 11), Transposed(99, 3)),
    "channels last, in space": (lambda x: x.contiguous(memory_format=torch.channels_last_3d), (2, 11, 2, 3, 4), Transposed(24, 11)),
    "transposed": (lambda x: x.t().contiguous().t(), (37, 80), Transposed(80, 37)),
    "batches": (lambda x: x.mT.contiguous().mT, (3, 2, 17, 16), Transposed(16, 17)),
}


#: Codes of every kind and width.
CODED: list[Format] = [E4M3FNUZ, E2M1, Int(8), FP16, FP32]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.randoms())
def test_memory_layouts_are_recognized(sizes: list[int], random: object) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    whole = torch.arange(math.prod(sizes)).view(sizes)
    x = torch.empty(whole.permute(order).shape, dtype=whole.dtype).permute(torch.argsort(torch.tensor(order)).tolist()).copy_(whole)
    memory = memory_of(x.shape, x.stride())
    assert memory.is_dense
    in_memory = x.as_strided((x.numel(),), (1,))
    if memory.transposed is not None:
        rows, columns = memory.transposed
        assert torch.equal(in_memory.view(-1, rows, columns), torch.arange(x.numel()).view(-1, columns, rows).mT)
    # Other tensors are in order, or in an order that takes more than one exchange of neighbouring dimensions.
    elif len(memory.steps) < 3:
        assert torch.equal(in_memory, torch.arange(x.numel()))


@pytest.mark.parametrize(
    ("shape", "strides"), [((4, 3), (6, 2)), ((4, 3), (0, 1)), ((2, 3), (1, 1)), ((4, 3), (1, 5))], ids=["gaps", "again", "shared", "wide"]
)
def test_tensors_that_do_not_fill_their_memory_are_not_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    memory = memory_of(torch.Size(shape), strides)
    assert not memory.is_dense
    assert memory.transposed is None


@pytest.mark.parametrize("layout", TRANSPOSED)
def test_transposed_tensors(layout: str) -> None:
    lay, shape, expected = TRANSPOSED[layout]
    assert memory_of(torch.Size(shape), lay(torch.empty(shape)).stride()).transposed == expected


@pytest.fixture
def nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which a tensor is copied into logical order."""

    def refuse(run: object, *tensors: Tensor) -> NoReturn:
        raise AssertionError("a tensor was put into logical order")

    monkeypatch.setattr(launch, "in_order", refuse)


def laid(layout: str, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Difficult numbers in the memory layout of such a tensor."""
    lay, shape, _ = TRANSPOSED[layout]
    numbers = difficult(fmt, dtype)
    x: Tensor = lay(numbers.repeat(-(-math.prod(shape) // len(numbers)))[: math.prod(shape)].view(shape))
    assert not x.is_contiguous()
    return x


def turn(layout: str) -> int:
    """The start of `dealt`: a different setting for the next layout."""
    return [*TRANSPOSED].index(layout)


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("nothing_is_copied")
@pytest.mark.parametrize("layout", TRANSPOSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, Int(8)], ids=repr)
def test_nothing_is_copied_and_bits_are_those_of_logical_indices(fmt: Format, dtype: torch.dtype, layout: str) -> None:
    x = laid(layout, fmt, dtype)
    settings: list[tuple[str | Stochastic, int, torch.dtype]] = [
        ("nearest", 0, torch.float32),
        ("stochastic", 0, dtype),
        ("stochastic", 5, dtype),
        ("stochastic", 8, torch.bfloat16),
        (Stochastic(6, correction=True), 2**33 + 8, torch.float32),
        (Stochastic(32), 0, dtype),
    ]
    for rounding, offset, target in dealt(settings, turn(layout) + dtype.itemsize.bit_length() + (fmt == E4M3), 3):
        how = rule(rounding, "saturate")
        found, expected = torch.full_like(x, 77, dtype=target), torch.full(x.shape, 77, dtype=target, device=DEVICE)
        kernels.quantize_into(found, x, GridRounding(fmt.grid, how), (seed(), 3, offset))
        reference.quantize_into(expected, x, GridRounding(fmt.grid, how), (seed(), 3, offset))
        assert not first_difference(x, found, expected)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("nothing_is_copied")
@pytest.mark.parametrize("layout", TRANSPOSED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", CODED, ids=repr)
def test_codes(fmt: Format, dtype: torch.dtype, layout: str) -> None:
    whole = laid(layout, fmt, dtype)
    settings = [(has_nan, *how) for has_nan in (True, False) for how in (("nearest", 0), ("stochastic", 0), ("stochastic", 3))]
    for has_nan, rounding, offset in dealt(settings, turn(layout) + CODED.index(fmt) + 2 * (dtype == torch.float16), 6):
        x = whole if has_nan else whole.nan_to_num()
        results = []
        for module in (reference, kernels):
            codes = torch.full_like(x, 77, dtype=code_dtype(fmt))
            assert codes.stride() == x.stride()
            lost = module.encode_into(codes, x, Encoding(fmt.grid, rule(rounding, "saturate"), fmt.coding), (seed(), 3, offset))
            assert bool(lost) == (has_nan and fmt.coding.nan < 0)
            values = torch.full_like(x, 77, dtype=torch.float32)
            module.decode_into(values, codes, fmt.grid, fmt.coding)
            results.append((codes, values))
        assert not first_difference(x, results[0][0], results[1][0])
        assert not first_difference(x, results[0][1], results[1][1])


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("nothing_is_copied")
@pytest.mark.parametrize("layout", TRANSPOSED)
@pytest.mark.parametrize("number", range(3))
def test_values_and_codes_from_one_read(number: int, layout: str) -> None:
    x = laid(layout, E4M3, torch.bfloat16)
    rounding, other = (("nearest", "stochastic"), ("stochastic", "nearest"), ("stochastic", "stochastic"))[number]
    first, second = rule(rounding, "saturate"), rule(other, "saturate")
    for fmt in dealt([E4M3, E5M2], turn(layout) + number, 2):
        results = []
        for module in (reference, kernels):
            out, codes = torch.full_like(x, 77), torch.full_like(x, 77, dtype=torch.uint8)
            module.quantize_and_encode_into(
                out, codes, x, GridRounding(E4M3.grid, first), (seed(), 3, 0), Encoding(fmt.grid, second, fmt.coding), (seed(), 4, 0)
            )
            results.append((out, codes))
        assert not first_difference(x, results[0][0], results[1][0])
        assert not first_difference(x, results[0][1], results[1][1])


@pytest.mark.usefixtures("nothing_is_copied")
def test_in_place() -> None:
    x = laid("channels last", BF16, torch.float32)
    expected = torch.empty_like(x)
    reference.quantize_into(expected, x, GridRounding(BF16.grid, rule("stochastic", "saturate")), (seed(), 3, 0))
    kernels.quantize_into(x, x, GridRounding(BF16.grid, rule("stochastic", "saturate")), (seed(), 3, 0))
    assert torch.equal(raw(x), raw(expected))


@pytest.mark.usefixtures("nothing_is_copied")
def test_without_random_bits_any_dense_order_will_do() -> None:
    x = difficult(E4M3, torch.float32)[:840].view(4, 6, 5, 7).permute(2, 0, 3, 1)
    found, expected = torch.full_like(x, 77), torch.full_like(x, 77)
    assert found.stride() == x.stride()
    kernels.quantize_into(found, x, GridRounding(E4M3.grid, rule("nearest", "saturate")), (None, 0, 0))
    reference.quantize_into(expected, x, GridRounding(E4M3.grid, rule("nearest", "saturate")), (None, 0, 0))
    assert not first_difference(x, found, expected)


def test_small_matrices_are_copied_rather_than_given_a_program_each() -> None:
    how = rule("stochastic", "saturate")
    for shape, is_copied in (((50, 4, 4), True), ((3, 16, 15), True), ((3, 16, 16), False), ((1, 16, 16), False)):
        x = torch.rand(shape, device=DEVICE).mT.contiguous().mT
        assert (launch_layout(ElementOrder.GROUPS, x.shape, x.stride(), x.stride()) is None) == is_copied
        found, expected = torch.empty_like(x), torch.empty_like(x)
        kernels.quantize_into(found, x, GridRounding(E4M3.grid, how), (seed(), 3, 0))
        reference.quantize_into(expected, x, GridRounding(E4M3.grid, how), (seed(), 3, 0))
        assert not first_difference(x, found, expected)


@triton.jit
def _note_places(places, inside, first, program, rows: tl.int64, columns: tl.int64, tile: tl.constexpr):
    at = tl.arange(0, tile.columns)[:, None] * tile.rows + tl.arange(0, tile.rows)[None, :]
    own, within, indices = places_of(program, rows, columns, tile)
    tl.store(places + at, own)
    tl.store(inside + at, within.to(tl.int32))
    tl.store(first + tl.arange(0, tile.columns), indices)


@pytest.mark.parametrize(("rows", "columns"), [(3, 2**31 + 65), (2**31 + 65, 3)])
def test_places_of_matrices_beyond_32_bits(rows: int, columns: int) -> None:
    tile = tile_of(Transposed(rows, columns), ElementOrder.GROUPS)
    size = tile.rows * tile.columns
    places, inside = torch.empty(size, dtype=torch.int64, device=DEVICE), torch.empty(size, dtype=torch.int32, device=DEVICE)
    first = torch.empty(tile.columns, dtype=torch.int64, device=DEVICE)
    last = -(-rows // tile.rows) * -(-columns // tile.columns) - 1
    _note_places[(1,)](places, inside, first, last, rows, columns, tile)
    # The last tile of a matrix contains its last element, and all others from its first row and column on.
    row, column = (rows - 1) // tile.rows * tile.rows, (columns - 1) // tile.columns * tile.columns
    expected = [[r * columns + c for r in range(row, rows)] for c in range(column, columns)]
    assert places[inside.bool()].tolist() == [place for places in expected for place in places]
    assert first[: columns - column].tolist() == [c * rows + row for c in range(column, columns)]


@pytest.mark.parametrize("rows", [1, 2, 7, 48, 49, 1024, 5000])
@pytest.mark.parametrize("columns", [2, 3, 17, 64, 65, 4096])
@pytest.mark.parametrize("aligned", [False, True])
def test_tiles(rows: int, columns: int, aligned: bool) -> None:
    tile = tile_of(Transposed(rows, columns), ElementOrder.GROUPS if aligned else ElementOrder.INDEX)
    assert tile.rows * tile.columns <= 2048
    assert tile.columns == 64 or tile.columns >= columns
    assert tile.rows % 16 == 0
    assert tile.whole == (rows % tile.rows == 0 and columns % tile.columns == 0)
    assert tile.even == (columns % 16 == 0)
    assert tile.aligned == (aligned and rows % 8 == 0)
