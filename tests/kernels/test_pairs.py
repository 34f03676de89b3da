"""Rounding two elements at a time on a GPU, compared with the definition: codes for all inputs of 16 bits, blocks for all exponents."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product as every

import pytest
import torch

import qsim
from qsim.functional.arguments import spelling
from qsim.random import Noise
from qsim.rounding import Overflow
from qsim.scaling import PerBlock, PerTile
from qsim.scaling.block_formats import NAMED
from qsim.transforms import Hadamard
from qsim_kernels.numbers.encoding import read_encoding, spell_encoding
from qsim_kernels.numbers.scales import Restore, TileSizes
from qsim_kernels.ops.scaled import Implementation
from support.comparing import same_bits
from support.scaled_settings import REFERENCE

pytest.importorskip("triton")

from qsim_kernels.triton.device import conversions
from qsim_kernels.triton.host import capabilities

KERNELS = Implementation("qsim_kernels.triton.scaled.launch")

#: So often that some of the values near zero need the last of their random bits.
REPEATS = 64


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "e3m4", "e2m5", "e5m1"])
def test_codes_of_all_inputs(name: str) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).repeat(REPEATS)
    expected = qsim.encode(x, name, rounding="stochastic", seed=Noise(7, 5), check=False)
    codes = qsim.encode(x.cuda(), name, rounding="stochastic", seed=Noise(torch.tensor(7, device="cuda"), 5), check=False)
    assert torch.equal(codes.cpu(), expected)
    # The end of a tensor that fills no block, and a piece that begins at another piece's end.
    piece = x.cuda()[2**16 :][: 2**16 - 5]
    codes = qsim.encode(piece, name, rounding="stochastic", seed=Noise(7, 5, offset=2**16), check=False)
    assert torch.equal(codes.cpu(), expected[2**16 :][: 2**16 - 5])


@pytest.mark.gpu
@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "e3m4", "e2m5", "e5m1", "e8m0"])
def test_transposed_values_of_all_inputs(name: str, overflow: Overflow) -> None:
    """In whole tiles and others, from the beginning of a tensor's random bits and from elsewhere."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).repeat(3)
    for rows, columns in ((64, 1024), (24, 2736), (96, 48)):
        x = every[: rows * columns].view(rows, columns).t()
        for offset in (0, 8, 2**40):
            expected = qsim.quantize(x, name, rounding="stochastic", overflow=overflow, seed=Noise(7, 5, offset))
            found = qsim.quantize(x.cuda(), name, rounding="stochastic", overflow=overflow, seed=Noise(7, 5, offset))
            assert found.stride() == x.stride()
            assert same_bits(found.cpu(), expected)
    # A piece whose pairs are not aligned in memory.
    piece = every[1 : 1 + 96 * 48].view(96, 48).t()
    expected = qsim.quantize(piece, name, rounding="stochastic", overflow=overflow, seed=Noise(7, 5))
    found = qsim.quantize(every.cuda()[1 : 1 + 96 * 48].view(96, 48).t(), name, rounding="stochastic", overflow=overflow, seed=Noise(7, 5))
    assert same_bits(found.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m4"])
def test_codes_of_all_inputs_and_of_their_transpose(name: str, overflow: Overflow) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    spelt = qsim.Quantizer(name, overflow=overflow).spelt
    given = spell_encoding(spelt.grid, spelt.rule, spelt.coding), 0, torch.uint8
    codes, turned = torch.ops.qsim.encode_with_transpose.default(x.cuda(), None, *given, *given)
    expected = qsim.encode(x, name, overflow=overflow)
    assert torch.equal(codes.cpu(), expected)
    assert torch.equal(turned.cpu(), expected.t())


@pytest.mark.parametrize(("other", "expected"), [((9, 0), True), ((10, 0), True), ((8, 0), False)])
def test_launches_that_serve_several_gpus_have_what_each_of_them_has(
    other: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: other if device else (9, 0))
    assert capabilities.supports_packed_16_bit.__wrapped__() == expected


def test_which_codes_the_gpu_converts_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "supports_packed_16_bit", lambda: True)

    def converts(name: str, rounding: str = "nearest", overflow: Overflow = "saturate", source: torch.dtype = torch.bfloat16) -> bool:
        spelt = qsim.Quantizer(name, rounding, overflow=overflow).spelt
        encoding = read_encoding(spell_encoding(spelt.grid, spelt.rule, spelt.coding))
        return conversions.conversion_of(encoding, source) is not None

    assert converts("e4m3")
    assert converts("e5m2")
    assert converts("e4m3", overflow="nonfinite")
    assert not converts("e5m2", overflow="nonfinite")  # the conversion saturates, and has no infinities
    assert not any(converts(name) for name in ("e4m3fnuz", "e3m4", "int8", "e2m1"))
    assert not any(converts("e4m3", rounding) for rounding in ("stochastic", "up", "nearest_away"))
    assert not converts("e4m3", source=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("name", [*NAMED, "Block('e2m1', 64, rule='ceil')", "Block('e4m3', 16, scale='bf16', rule='fit')"])
def test_stochastic_blocks_of_all_exponents(name: str, dim: int) -> None:
    for x in matrices():
        expected = qsim.quantize(x, name, rounding="stochastic", dim=dim, seed=Noise(7, 5))
        found = qsim.quantize(x.cuda(), name, rounding="stochastic", dim=dim, seed=Noise(torch.tensor(7, device="cuda"), 5))
        assert same_bits(found.cpu(), expected)
    # A piece that is not aligned in memory, with random bits that begin elsewhere.
    pieces = [y.view(-1)[1:-31].view(-1, 32) for y in (x, x.cuda())]
    expected, found = (qsim.quantize(y, name, rounding="stochastic", dim=dim, seed=Noise(7, 5, offset=16)) for y in pieces)
    assert same_bits(found.cpu(), expected)
    assert same_bits(qsim.quantize(pieces[0].cuda(), name, rounding="stochastic", dim=dim, seed=Noise(7, 5, offset=16)).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("name", [*NAMED, "Block('e2m1', 64, rule='ceil')", "Block('e5m1', 16, scale='e8m0', rule='even')"])
def test_nearest_blocks_of_all_exponents(name: str, dim: int) -> None:
    for x in matrices():
        assert same_bits(qsim.quantize(x.cuda(), name, dim=dim).cpu(), qsim.quantize(x, name, dim=dim))
        ties = (x.float() * 0.0625).round().bfloat16()
        assert same_bits(qsim.quantize(ties.cuda(), name, dim=dim).cpu(), qsim.quantize(ties, name, dim=dim))


def matrices() -> Iterator[torch.Tensor]:
    """Matrices in bfloat16: normal numbers, some so small that the last random bits matter, all exponents, special ones."""
    x = torch.randn(300, 1056, generator=torch.Generator().manual_seed(0))
    exponents = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    small = x * torch.exp2(-34 * exponents)
    small[::16, ::16] = 1
    yield from (x.bfloat16(), small.bfloat16(), (x * torch.exp2(250 * exponents - 125)).bfloat16(), (x * 2.0**-126).bfloat16())
    x[:128] = x[:, 64:96] = 0
    yield x.bfloat16()
    x[5, 7], x[200, 9], x[290, 400] = math.nan, math.inf, -math.inf
    yield x.bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [-1, 0])
def test_factors_of_blocks_without_that_of_the_tensor(dim: int) -> None:
    """As layers round NVFP4, whose tensors' scales are left to the product."""
    spelt, scaling = spelling("e2m1", "stochastic", "saturate"), PerBlock(16, dim, "e4m3")
    for x in matrices():
        whole = torch.tensor(0.37)
        numbers = scaling.tiles(x.shape), (), *scaling.spelling(spelt.format)
        noise = torch.tensor(3), spelt.grid, spelt.rule, 7, 0, torch.bfloat16, int(Restore.SCALE)
        expected, _ = REFERENCE.quantize_tiles(x, whole, *numbers, *noise)
        found, _ = KERNELS.quantize_tiles(x.cuda(), whole.cuda(), *numbers, *noise)
        assert same_bits(found.cpu(), expected)


@pytest.mark.parametrize(("height", "width"), [*every((1, 2, 4, 8, 16, 32, 64, 128), (1, 16, 32, 128))])
def test_threads_hold_all_elements_that_share_random_bits(height: int, width: int) -> None:
    partition = pytest.importorskip("qsim_kernels.triton.scaled.partition", reason="needs triton")
    read = partition.reading(2**20, torch.bfloat16, TileSizes(2**10, 2**10, height, width, False), None)
    cut = partition.cut_into_pairs(read, joins_rows=True)
    assert cut is None or cut.shape.height * cut.shape.width >= 4 * 32 * cut.warps
    assert cut is not None or (width == 1 and height < 16)


@pytest.mark.gpu
@pytest.mark.parametrize(("rounding", "scale"), [("stochastic", "e4m3"), ("nearest", "e8m0")])
@pytest.mark.parametrize(("height", "width"), [(2, 16), (4, 64), (8, 16), (16, 16), (128, 128)])
def test_tiles(height: int, width: int, rounding: str, scale: str) -> None:
    spelt, scaling = spelling("e2m1", rounding, "saturate"), PerTile(height, width, scale, "ceil")
    for x in matrices():
        numbers = scaling.tiles(x.shape), (), *scaling.spelling(spelt.format)
        seed = torch.tensor(3) if spelt.is_stochastic else None
        noise = seed, spelt.grid, spelt.rule, 7, 16, torch.bfloat16, int(Restore.SCALE)
        expected, _ = REFERENCE.quantize_tiles(x, None, *numbers, *noise)
        found, _ = KERNELS.quantize_tiles(x.cuda(), None, *numbers, *noise)
        assert same_bits(found.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("restore", [Restore.SCALE, Restore.ALL])
@pytest.mark.parametrize(
    ("fmt", "scaling", "size", "under"),
    [
        ("e2m1", PerBlock(32, rule="ceil"), 32, None),
        ("e4m3", PerBlock(32), 32, None),
        ("e2m1", PerBlock(32, format="e8m0", rule="ceil"), 32, None),
        ("e2m1", PerBlock(16, format="e4m3"), 16, 0.37),
        ("e2m1", PerBlock(16, format="e4m3", rule="ceil"), 16, 0.37),
        ("e5m2", PerBlock(16, format="bf16", rule="fit"), 16, None),
    ],
)
def test_blocks_of_a_transform(fmt: str, scaling: PerBlock, size: int, under: float | None, dim: int, restore: Restore) -> None:
    scaling, spelt, turning = replace(scaling, dim=dim), spelling(fmt, "stochastic", "saturate"), Hadamard(size, seed=3)
    whole = None if under is None else torch.tensor(under)
    # So many rows that programs are in the middle of a matrix, and the largest numbers, whose sums overflow.
    for x in (*matrices(), torch.full((32, 64), 3e38).bfloat16()):
        x = x[: x.shape[0] // 32 * 32]
        numbers = scaling.tiles(x.shape), turning.turn(x.shape, dim), *scaling.spelling(spelt.format)
        noise = torch.tensor(3), spelt.grid, spelt.rule, 7, 16, torch.bfloat16, int(restore)
        expected, _ = REFERENCE.quantize_tiles(x, whole, *numbers, *noise)
        found, _ = KERNELS.quantize_tiles(x.cuda(), None if whole is None else whole.cuda(), *numbers, *noise)
        assert same_bits(found.cpu(), expected)
