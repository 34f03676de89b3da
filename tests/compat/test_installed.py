"""`qsim.compat.qtorch` and the guide compared with QPyTorch itself, if installed, and with its arithmetic written out."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim.compat import qtorch as compat
from qsim.compat.qtorch.quant import quant_function

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "from-qpytorch.md"


def blocks_written_out(x: Tensor, wl: int, dim: int = -1, rounding: str = "nearest") -> Tensor:
    """QPyTorch 0.3.0's `block_quantize`, bit by bit: it adds six times the shared power of two and truncates the low bits of the sum."""
    assert rounding == "nearest"
    largest = x.abs().amax([d for d in range(x.dim()) if d != dim], keepdim=True)
    power = largest.view(torch.int32) & 0x7F800000
    base = power.view(torch.float32) * 6
    low = (1 << (23 - wl)) - 1
    rounded = (((x + base).view(torch.int32) + (1 << (22 - wl))) & ~low).view(torch.float32) - base
    bits = rounded.view(torch.int32)
    limit = power | (0x7FFFFF >> (25 - wl) << (25 - wl)) | (bits & -0x80000000)
    return torch.where((bits & 0x7F800000) > power, limit, bits).view(torch.float32)


@pytest.fixture(scope="module")
def installed() -> ModuleType:
    """QPyTorch 0.3.0. It compiles C++ when imported, which takes a minute the first time and needs ninja and a compiler."""
    try:
        importlib.import_module("qtorch.quant")
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"QPyTorch cannot be imported: {error}")
    return importlib.import_module("qtorch")


@pytest.fixture(params=["written out", "installed"])
def block_quantize(request: pytest.FixtureRequest) -> Any:
    """QPyTorch's `block_quantize`."""
    return blocks_written_out if request.param == "written out" else request.getfixturevalue("installed").quant.block_quantize


def replacements(wl: int, dim: int) -> list[str]:
    """The guide's two replacements of `block_quantize`, for another word length and dimension than printed."""
    rows = re.findall(r"^\| (?:`block_quantize\(.*|the same bits as in QPyTorch) \| `(.*)` \|$", GUIDE.read_text(encoding="utf-8"), re.M)
    assert len(rows) == 2
    assert all("qsim.Fixed(8, 6, symmetric=True)" in row for row in rows)
    scale = 'qsim.scaling.PerTensor("e8m0", "floor")' if dim == -1 else f'qsim.scaling.PerAxis({dim}, "e8m0", "floor")'
    assert scale.replace(f"({dim}, ", "(0, ") in GUIDE.read_text(encoding="utf-8")
    return [row.replace("Fixed(8, 6,", f"Fixed({wl}, {wl - 2},").replace("scale=s", f"scale={scale}") for row in rows]


def evaluated(code: str, x: Tensor) -> Tensor:
    found: Tensor = eval(code, {"qsim": qsim, "x": x})
    return found


def blocks() -> Tensor:
    """Blocks along each of three dimensions: random, ties and their neighbours, saturating, zero, tiny and huge."""
    generator = torch.Generator().manual_seed(16)
    x = torch.randn(12, 40, 24, generator=generator) * torch.randint(-12, 12, (12, 40, 24), generator=generator).float().exp2()
    ties = (torch.randint(-512, 512, (40, 24), generator=generator) + 0.5) * 2.0**-8
    x[0] = ties
    x[1] = ties.nextafter(torch.tensor(10.0)) * (1 + 2.0**-22)
    x[2] = ties.nextafter(torch.tensor(-10.0))
    x[3] = torch.tensor([-1.999, 0.1]).repeat(40, 12)
    x[4] = torch.tensor([0.0, -0.0]).repeat(40, 12)
    x[5] = (2 - 2.0**-23) * torch.tensor([1.0, -1.0]).repeat(40, 12)
    x[6] *= 2.0**-126 / x[6].abs().max()
    x[7] *= 2.0**125 * (2 - 2.0**-23) / x[7].abs().max()
    x[8] = -(2.0 ** -torch.arange(24.0))
    return x


def test_the_guides_blocks_have_qpytorchs_bits(block_quantize: Any) -> None:
    x = blocks()
    for wl in range(2, 23):
        for dim, each in ((-1, x[0]), (-1, x[2, :, :7]), (0, x), (1, x[:6]), (2, x[:6]), (-1, x[7]), (-1, x[4])):
            bits = [
                found.view(torch.int32) for found in (block_quantize(each, wl, dim, "nearest"), evaluated(replacements(wl, dim)[1], each))
            ]
            assert torch.equal(*bits), (wl, dim)
    assert block_quantize(torch.tensor([[-1.999, 0.1]]), 8, 0, "nearest").tolist() == [[-1.984375, 0.09375]]


def test_the_guides_blocks_that_round_once_are_the_layers() -> None:
    x = blocks()
    for wl in (2, 3, 4, 8, 12, 22, 25):
        for dim, each in ((-1, x[0]), (0, x), (1, x[:6]), (2, x[:6])):
            assert torch.equal(quant_function.block_quantize(each, wl, dim, "nearest"), evaluated(replacements(wl, dim)[0], each))
    assert evaluated(replacements(8, 0)[0], torch.tensor([[-1.999, 0.1]])).tolist() == [[-1.984375, 0.09375]]


def test_long_words_are_qpytorchs(installed: ModuleType) -> None:
    """On numbers that QPyTorch rounds once: below 2**20 steps with three more bits, and from 2**24 steps on."""
    generator = torch.Generator().manual_seed(3)
    eighths = torch.randint(-(2**23), 2**23, (3000,), generator=generator) / 8
    huge = torch.randn(1000, generator=generator).sign() * 2.0 ** torch.linspace(24, 90, 1000)
    x = torch.cat([eighths, huge, torch.tensor([torch.inf, -torch.inf, 0.0])])
    for wl, fl, symmetric in [
        (26, 10, False),
        (26, 25, True),
        (32, 16, False),
        (32, 16, True),
        (40, 20, False),
        (64, 1, True),
        (200, 10, False),
    ]:
        each = x * 2.0**-fl
        theirs = installed.quant.fixed_point_quantize(each, wl, fl, True, symmetric, "nearest")
        assert torch.equal(quant_function.fixed_point_quantize(each, wl, fl, True, symmetric, "nearest"), theirs), (wl, fl)
        free = installed.quant.fixed_point_quantize(each, wl, fl, False, symmetric, "nearest")
        assert torch.equal(quant_function.fixed_point_quantize(each, wl, fl, False, symmetric, "nearest"), free), (wl, fl)


def test_nine_bits_of_exponent_are_qpytorchs(installed: ModuleType) -> None:
    """With ties away from zero, bit for bit, subnormals and infinities included."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5000, generator=generator) * 2.0 ** torch.linspace(-149, 124, 5000)
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 1.0625, -1.0625])])
    for exp, man in [(9, 6), (9, 3), (10, 1), (31, 22)]:
        theirs = installed.quant.float_quantize(x, exp, man, "nearest")
        ours = quant_function.float_quantize(x, exp, man, "nearest_away")
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), (exp, man)


def results_of_changes(package: ModuleType) -> list[list[float]]:
    """The results of a script that changes its numbers between forward and backward passes."""
    found = []
    values, gradients = package.FixedPoint(8, 4), package.FixedPoint(8, 6)
    module = package.quant.Quantizer(values, gradients, "nearest", "nearest")
    twin = copy.deepcopy(module)
    float_number, block = package.FloatingPoint(4, 3), package.BlockFloatingPoint(8)
    others = [package.quant.quantizer(number, forward_rounding="nearest") for number in (float_number, block)]
    for wl, fl, clamp, symmetric in [
        (8, 4, True, False),
        (6, 3, True, False),
        (6, 3, False, False),
        (4, 1, True, True),
        (32, 16, True, False),
    ]:
        values.wl, values.fl, values.clamp, values.symmetric = wl, fl, clamp, symmetric
        float_number.exp, float_number.man, block.wl, block.dim = 2 + wl % 4, fl, min(wl, 20), fl % 3 - 1
        x = torch.tensor([[0.3, -1.7], [101.0, -99.0]], requires_grad=True)
        out = module(x)
        gradients.fl = fl + 1
        out.backward(torch.full_like(x, 0.3))
        assert x.grad is not None
        found += [t.flatten().tolist() for t in (out, twin(x), x.grad, *(other(x) for other in others))]
    return found


def test_numbers_change_as_qpytorchs(installed: ModuleType) -> None:
    assert results_of_changes(compat) == results_of_changes(installed)
    for package in (compat, installed):
        number = package.FixedPoint(8, 4)
        assert number != package.FixedPoint(8, 4)
        assert {number: 1}[number] == 1
