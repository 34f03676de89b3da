"""Scales and rounding with them, compared with fractions, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

import qsim
from qsim import scaling
from qsim.formats import E2M1, E4M3, E5M2, E8M0, Format
from qsim.scaling import Block
from support.scales import BLOCKS, scale_of


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", ["fit", "ceil", "floor", "even", "ceil_log2"])
@pytest.mark.parametrize("fmt", [E8M0, E4M3], ids=["E8M0", "E4M3"])
@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2, qsim.Int(8)], ids=["E2M1", "E4M3", "E5M2", "int8"])
@pytest.mark.parametrize("margin", [0, 2])
def test_scales_follow_their_rule(rule: str, fmt: Format, element: Format, margin: int) -> None:
    scaling = qsim.scaling.PerBlock(4, format=fmt, rule=rule, margin=margin)
    x = torch.tensor(list(BLOCKS.values()), dtype=torch.float32)
    amaxes = torch.ops.qsim.amaxes(x, scaling.tiles(x.shape), [], False)
    found = torch.ops.qsim.scales(amaxes, None, *scaling.spelling(element)).flatten().tolist()
    for name, block, scale in zip(BLOCKS, x.tolist(), found, strict=True):
        expected = scale_of(block, element, fmt, rule, margin)
        assert math.isnan(scale) if expected is None else Fraction(scale) == expected, name


def test_ocps_rule_saturates_and_the_rounded_up_one_does_not() -> None:
    x = torch.tensor([957.0] + [0.0] * 31)
    assert qsim.quantize(x, "mxfp8")[0] == 896
    assert qsim.quantize(x, Block("e4m3", 32, rule="ceil"))[0] == 960


@pytest.mark.parametrize("scale", [scaling.PerTensor(), scaling.PerAxis(0), scaling.PerBlock(4), scaling.PerTile(2, 2)], ids=str)
def test_values_have_the_memory_layout_of_the_input(scale: scaling.Scaling) -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for x in (torch.randn(5, 7).t(), images, torch.randn(4, 8)[:, ::2], torch.randn(3, 1).expand(3, 4)):
        found = qsim.quantize(x, "e2m1", scale=scale)
        assert found.stride() == qsim.quantize(x, "e2m1").stride()
        assert torch.equal(found, qsim.quantize(x.contiguous(), "e2m1", scale=scale))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: scaling.PerTensor(rule="round"), ValueError, r"Tensor: rule must be 'fit', .*, got 'round'"),
        (lambda: scaling.PerBlock(16, outer="axis"), TypeError, r"PerBlock: outer must be a qsim.scaling.PerTensor .*, got 'axis'"),
        (
            lambda: qsim.Block("e2m1", 16, outer="PerAxis(axis=0)"),
            TypeError,
            r"PerBlock: outer must be a qsim.scaling.PerTensor .*, got 'PerAxis\(axis=0\)'",
        ),
        (
            lambda: scaling.PerBlock(16, outer=scaling.PerAxis(0)),
            TypeError,
            r"PerBlock: outer must be a qsim.scaling.PerTensor without an outer",
        ),
        (
            lambda: scaling.PerTile(2, 2, outer=scaling.PerTensor(outer=scaling.PerTensor())),
            TypeError,
            "PerTile: outer must be a qsim.scaling.PerTensor",
        ),
        (lambda: Block("e2m1", (4, 4, 4)), ValueError, r"Block: size must be a number, or height and width of a tile, got \(4, 4, 4\)"),
    ],
)
def test_arguments_of_scales_are_checked(make: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_scales_without_arguments_are_resolved_by_name() -> None:
    x = torch.tensor([[0.001, 0.003], [100.0, 300.0]])
    assert scaling.resolve("tensor") == scaling.resolve("PerTensor()") == scaling.PerTensor()
    assert scaling.resolve("delayed") == scaling.Delayed()
    assert torch.equal(qsim.quantize(x, "e2m1", scale="tensor"), qsim.quantize(x, "e2m1", scale=scaling.PerTensor()))
    for name in ("blocks", "axis", "tiles", "given"):
        with pytest.raises(ValueError, match="scale must be 'tensor', 'row', 'delayed', PerTensor"):
            scaling.resolve(name)
    with pytest.raises(ValueError, match="got 'tensr': did you mean 'tensor'"):
        scaling.resolve("tensr")
