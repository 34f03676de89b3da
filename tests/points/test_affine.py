"""Affine integers against torch's fake quantization and observers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

import qsim
from qsim.points import Affine
from qsim.scaling import PerAxis, PerBlock, PerTile
from support.comparing import same_bits

FORMATS = {"uint8": (0, 255), "int8": (-128, 127), "uint4": (0, 15)}


def inputs(*shape: int) -> tuple[Tensor, Tensor]:
    """The same numbers twice, for two gradients: some beyond the range, and some halfway between two integers."""
    x = torch.randn(*shape) * 20
    x.view(-1)[:8] = torch.tensor([-1000.0, 1000.0, 0.125, 0.375, -0.125, -0.375, 0.0, 31.875])
    return x.requires_grad_(), x.detach().clone().requires_grad_()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("zero_point", [0, 3])
def test_is_torchs_fake_quantization_per_tensor(name: str, zero_point: int) -> None:
    # The scale is a power of two, because torch multiplies by its rounded inverse.
    (x, other), upstream = inputs(50, 6), torch.randn(50, 6)
    y = Affine(name, scale=0.25, zero_point=zero_point)(x)
    due = torch.fake_quantize_per_tensor_affine(other, 0.25, zero_point, *FORMATS[name])
    y.backward(upstream)
    due.backward(upstream)
    assert torch.equal(y, due)
    assert x.grad is not None
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
    assert 0 < (x.grad == 0).sum() < 300


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_is_torchs_fake_quantization_per_channel(dim: int) -> None:
    (x, other), upstream = inputs(5, 4, 6), torch.randn(5, 4, 6)
    count = x.shape[dim]
    scale = 2.0 ** torch.arange(-3.0, count - 3)
    zero_point = torch.arange(count) - 2
    y = Affine("int8", PerAxis(dim), scale=scale, zero_point=zero_point)(x)
    due = torch.fake_quantize_per_channel_affine(other, scale, zero_point.int(), dim, -128, 127)
    y.backward(upstream)
    due.backward(upstream)
    assert torch.equal(y, due)
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "dtype"), [("uint8", torch.quint8), ("int8", torch.qint8)])
def test_ranges_are_those_of_torchs_observers(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(20, 30) + torch.linspace(-3, 3, 20).view(-1, 1)
    whole, rows = MinMaxObserver(dtype=dtype), PerChannelMinMaxObserver(0, dtype=dtype, qscheme=torch.per_channel_affine)
    for observer in (whole, rows):
        observer(x)
    scale, zero_point = whole.calculate_qparams()
    assert same_bits(Affine(name)(x), Affine(name, scale=scale, zero_point=zero_point)(x))
    scale, zero_point = rows.calculate_qparams()
    assert same_bits(Affine(name, PerAxis(0))(x), Affine(name, PerAxis(0), scale=scale, zero_point=zero_point)(x))
    assert (Affine(name)(x) - x).abs().max() <= whole.calculate_qparams()[0].item() * 0.51


@pytest.mark.parametrize("x", [torch.randn(6, 10), torch.randn(2, 5, 9)], ids=["matrix", "three dimensions"])
def test_groups_are_rounded_one_by_one(x: Tensor) -> None:
    whole = Affine("uint4")
    in_rows = torch.cat([torch.cat([whole(part) for part in row.split(4)]).view(1, -1) for row in x.reshape(-1, x.shape[-1])])
    assert same_bits(Affine("uint4", PerBlock(4))(x), in_rows.view_as(x))
    tiles = torch.cat([torch.cat([whole(part) for part in strip.split(4, -1)], -1) for strip in x[..., :4, :].split(2, -2)], -2)
    if x.dim() == 2:
        assert same_bits(Affine("uint4", PerTile(2, 4))(x[:4]), tiles)


def test_zero_is_exact_and_the_ends_are_reached() -> None:
    y = Affine("uint4")(torch.tensor([0.0, 0.7, 1.5]))
    assert (y[0], y[2]) == (0, 1.5)
    assert torch.equal(Affine("int4")(torch.zeros(3)), torch.zeros(3))
    assert Affine("int4")(torch.full((3,), -2.0)).tolist() == [-2.0] * 3


def test_stochastic_rounding_is_unbiased_between_neighbours() -> None:
    x = torch.full((10_000,), 0.3)
    y = Affine(qsim.Quantizer("int8", "stochastic"), scale=0.25)(x, seed=1)
    assert set(y.tolist()) == {0.25, 0.5}
    # The standard deviation of the mean is 0.001; five of them.
    assert abs(y.mean().item() - 0.3) < 0.005


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Affine("e4m3"), r"Affine: format must be an integer format of up to 16 bits, such as 'uint8', got Float\(4, 3"),
        (lambda: Affine(qsim.Int(24)), "Affine: format must be an integer format of up to 16 bits"),
        (lambda: Affine(qsim.Fixed(8, 2)), "Affine: format must be an integer format"),
        (
            lambda: Affine("int8", 3),
            "Affine: granularity must be PerTensor, PerRow, PerAxis, PerBlock or PerTile of qsim.scaling, got 3",
        ),
        (lambda: Affine("int8", qsim.scaling.Given(2.0)), "Affine: granularity must be PerTensor"),
        (lambda: Affine("int8", "delayed"), "Affine: granularity must be PerTensor"),
        (lambda: Affine("int8", "rows"), "scale must be 'tensor', 'row', 'delayed', .* got 'rows': did you mean 'row'"),
        (
            lambda: Affine("int8", PerBlock(32, format="e8m0")),
            "Affine: granularity only describes which elements form a group; leave format out",
        ),
        (lambda: Affine("int8", PerBlock(32, margin=1)), "leave margin out"),
        (lambda: Affine("int8", zero_point=3), "Affine: zero_point is for a fixed scale"),
        (lambda: Affine("int8", scale=0.0), "Affine: scale must be positive and finite, got 0.0"),
        (lambda: Affine("int8", scale=1.0, zero_point=0.5), "Affine: zero_point must be integers, got 0.5"),
        (
            lambda: Affine("int8", scale=torch.ones(3))(torch.ones(2)),
            "Affine: scale has 3 values for 1 groups: give one, or one for each group",
        ),
        (lambda: Affine("int8", PerAxis(2))(torch.ones(2, 2)), "PerAxis: there is no dimension 2"),
    ],
)
def test_errors_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        make()  # type: ignore[operator]


def test_granularities_are_texts_too() -> None:
    x = torch.randn(4, 8)
    assert torch.equal(Affine("uint4", "row")(x), Affine("uint4", qsim.scaling.PerRow())(x))
    assert qsim.points.Codebook([-1.0, 1.0], "PerBlock(4)").granularity == PerBlock(4)
