"""Operands of grouped products: all groups are rounded at once, with the bits that each has by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qsim import Quantizer, scaling
from qsim.nn.product.bilinear import LINEAR
from qsim.nn.product.groups import Groups
from qsim.nn.product.plans import ProductPlan
from qsim.nn.product.sites import Site
from qsim.random.places import Place
from qsim.scaling import Given, PerBlock, PerRow, PerTile
from qsim.transforms import Hadamard
from qsim_kernels.ops.direct import operators
from support.comparing import same_bits
from support.points import in_order
from support.side_by_side import DEVICE
from support.written_out import ProductSetting

UNDER = scaling.PerTensor()
SCALES: dict[str, Any] = {
    "none": None,
    "tensor": scaling.PerTensor(),
    "power": scaling.PerTensor("e8m0", "ceil"),
    "given": Given(0.25),
    "channel": PerRow(),
    "channel under tensor": PerRow(format="e4m3", outer=UNDER),
    "blocks": PerBlock(32, format="e8m0", rule="floor"),
    "blocks of 12": PerBlock(12),
    "blocks under tensor": PerBlock(16, format="e4m3", outer=UNDER),
    "tiles": PerTile(8, 16),
    "tiles under tensor": PerTile(4, 16, format="e4m3", outer=UNDER),
}
ENDS = [(5, 5, 40, 70), (0, 0, 0, 70), (33, 34, 50, 65), (16, 48, 64, 70)]
ROWS, INPUTS, OUTPUTS = 70, 32, 48


def plans(point: Quantizer) -> tuple[ProductPlan, ProductPlan, Tensor, Tensor, Tensor]:
    """The plans of a grouped product and of a linear layer, with an input, a stack of weights, and a gradient of the result."""
    points = in_order(*[point] * 5)
    generator = torch.Generator().manual_seed(0)
    a, w, g = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((ROWS, INPUTS), (4, OUTPUTS, INPUTS), (ROWS, OUTPUTS)))
    a[7], g[50, 3] = 100.0, torch.inf
    return ProductSetting(points, LINEAR).plan(a, w), ProductSetting(points, LINEAR).plan(a, w[0]), a, w, g


def in_groups(site: Site, ends: tuple[int, ...], device: torch.device) -> Site:
    return replace(site, groups=Groups(torch.tensor(ends, dtype=torch.int32, device=device)))


def both(site: Site, own: Site, x: Tensor, ends: tuple[int, ...]) -> Any:
    """For each group: rows or a matrix, and the factor of its product, from all groups at once and by itself."""
    ops = operators(x)
    rounded = in_groups(site, ends, x.device).round(ops, x, None, torch.float32)
    values, factor = rounded.values, torch.ones(1, 1, 1, device=x.device) if rounded.factor is None else rounded.factor
    for i, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        part = slice(start, end)
        alone = own.round(ops, x[part] if x.dim() == 2 else x[i], None, torch.float32)
        of_group = factor[i if len(factor) > 1 else 0]
        of_group = of_group[part] if len(of_group) == ROWS else of_group
        yield i, (values[part] if x.dim() == 2 else values[i]), alone.values, of_group, alone.factor


def check(site: Site, own: Site, x: Tensor, ends: tuple[int, ...]) -> None:
    for i, values, alone, of_group, factor in both(site, own, x, ends):
        assert same_bits(values, alone), (site.name, i)
        if values.numel():
            expected = torch.ones((), device=x.device) if factor is None else factor
            torch.testing.assert_close(*torch.broadcast_tensors(of_group, expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transform", [None, Hadamard(16)], ids=["", "transformed"])
@pytest.mark.parametrize("name", SCALES)
def test_groups_are_rounded_as_each_by_itself(name: str, transform: Hadamard | None) -> None:
    """Groups without rows, with fewer rows than a block or a transform, and rows after the last group, whose values do not matter."""
    grouped, alone, a, w, g = plans(Quantizer("e2m1", scale=SCALES[name], transform=transform))
    for ends in ENDS:
        a[ends[-1] :] = g[ends[-1] :] = 1e9
        check(grouped.first.forward, alone.first.forward, a, ends)
        check(grouped.first.backward, alone.first.backward, a, ends)
        check(grouped.gradient.for_first, alone.gradient.for_first, g, ends)
        check(grouped.gradient.for_second, alone.gradient.for_second, g, ends)
    check(grouped.second.forward, alone.second.forward, w, ENDS[0])
    check(grouped.second.backward, alone.second.backward, w, ENDS[0])


@pytest.mark.parametrize("name", ["tensor", "blocks", "blocks under tensor"])
def test_random_bits_are_those_of_the_indices_in_all_groups(name: str) -> None:
    """Along the sum over rows, every group begins with a new block, and indices count the rows that fill up the last ones."""
    grouped, alone, a, *_ = plans(Quantizer("e2m1", "stochastic", scale=SCALES[name]))
    size, ends = getattr(SCALES[name], "size", 1), ENDS[0]
    for site, own, block in ((grouped.first.forward, alone.first.forward, 1), (grouped.first.backward, alone.first.backward, size)):
        seed, ops, first = torch.tensor(3), operators(a), 0
        values = in_groups(site, ends, a.device).round(ops, a, seed, torch.float32).values
        for start, end in zip((0, *ends[:-1]), ends, strict=True):
            expected = replace(own, place=Place(first * INPUTS), layouts={}).round(ops, a[start:end], seed, torch.float32).values
            assert same_bits(values[start:end], expected)
            first += -(-(end - start) // block) * block


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCALES)
def test_a_gpu_rounds_groups_as_a_cpu(name: str) -> None:
    grouped, _, a, w, g = plans(Quantizer("e2m1", "stochastic", scale=SCALES[name], transform=Hadamard(16)))
    seed = torch.tensor(5)
    for site, x in ((grouped.first.forward, a), (grouped.gradient.for_second, g), (grouped.second.backward, w)):
        for dtype in (torch.float32, torch.bfloat16):
            one = in_groups(site, ENDS[0], x.device).round(operators(x), x.to(dtype), seed, dtype)
            other = in_groups(site, ENDS[0], torch.device("cpu")).round(operators(x.cpu()), x.to(dtype).cpu(), seed, dtype)
            assert same_bits(one.values.cpu(), other.values)
            assert (one.factor is None) == (other.factor is None)
            if one.factor is not None:
                torch.testing.assert_close(one.factor.cpu(), other.factor, rtol=0, atol=0, equal_nan=True)  # each has its own NaN
