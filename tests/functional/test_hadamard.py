"""Hadamard transforms: orthonormal for every shape, the same for everyone, and used by quantizers."""

from __future__ import annotations

import math

import pytest
import torch

import qsim
from qsim import Quantizer
from qsim.random import philox4x32
from qsim.transforms import Hadamard

SIZES = (2, 8, 64)


def sylvester(size: int) -> torch.Tensor:
    """Sylvester's matrix by its definition: the sign of an element is the parity of the bits that row and column share."""
    parities = [[bin(i & j).count("1") % 2 for j in range(size)] for i in range(size)]
    return 1 - 2 * torch.tensor(parities, dtype=torch.float64)


def matrix(transform: Hadamard, length: int) -> torch.Tensor:
    """The matrix of a transform of columns of some length, from the transformed unit vectors."""
    return transform(torch.eye(length, dtype=torch.float64), 0)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 64, 100])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("random_signs", [True, False])
def test_orthonormal_whatever_the_length(size: int, length: int, random_signs: bool) -> None:
    found = matrix(Hadamard(size, random_signs), length)
    torch.testing.assert_close(found @ found.t(), torch.eye(length, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_a_block_is_sylvesters_matrix_times_signs(size: int) -> None:
    torch.testing.assert_close(matrix(Hadamard(size, False), size), sylvester(size) / math.sqrt(size))
    signed = matrix(Hadamard(size), size) * math.sqrt(size) / sylvester(size)
    assert torch.equal(signed.abs().round(), torch.ones(size, size, dtype=torch.float64))
    torch.testing.assert_close(signed, signed[:1].expand_as(signed))  # one sign for each column


def test_the_remainder_is_split_into_powers_of_two() -> None:
    found = matrix(Hadamard(8, False), 11)
    expected = torch.block_diag(*[sylvester(size) / math.sqrt(size) for size in (8, 2, 1)])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(16,), (3, 21), (2, 5, 8), (2, 24, 3, 4), (0, 8), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_along_any_dimension_and_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    transform = Hadamard(8)
    x = torch.randn(shape).to(dtype)
    for dim in range(-len(shape), len(shape)):
        y = transform(x, dim)
        assert (y.dtype, y.shape) == (dtype, x.shape)
        torch.testing.assert_close(y, transform(x.movedim(dim, -1)).movedim(-1, dim))
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 5e-2, torch.float64: 1e-13}[dtype]
        torch.testing.assert_close(transform.inverse(y, dim), x, rtol=tolerance, atol=tolerance)


def test_signs_are_a_matter_of_the_seed_alone() -> None:
    x = torch.randn(4, 32)
    first = Hadamard(16)(x)
    torch.manual_seed(7)
    assert torch.equal(Hadamard(16)(x), first)
    assert not torch.equal(Hadamard(16, seed=1)(x), first)
    assert not torch.equal(Hadamard(16, random_signs=False)(x), first)


@pytest.mark.parametrize("inverse", [False, True])
def test_gradients_are_those_of_the_matrix(inverse: bool) -> None:
    transform = Hadamard(4)
    x = torch.randn(3, 7, 2, dtype=torch.float64, requires_grad=True)
    function = transform.inverse if inverse else transform
    assert torch.autograd.gradcheck(lambda x: function(x, 1), (x,))
    half = torch.randn(3, 8).bfloat16().requires_grad_()
    function(half).sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("fmt", ["e4m3", "nvfp4"])
def test_a_quantizer_rounds_between_a_transform_and_its_inverse(fmt: str) -> None:
    point, turn = Quantizer(fmt, transform=Hadamard(8)), Hadamard(8)
    for x in (torch.randn(3, 5, 16), torch.randn(6, 20).double()):
        assert torch.equal(point(x), turn.inverse(qsim.quantize(turn(x), fmt)))
        assert (point(x) - x).abs().max() < 0.5
    # Dtypes narrower than float32 are not used for intermediate results.
    half = torch.randn(4, 16).bfloat16()
    wide = turn.inverse(qsim.quantize(turn(half.float()), fmt))
    assert torch.equal(point(half), wide.bfloat16())
    assert torch.equal(point(half, dtype=torch.float32), wide)
    out = torch.empty(4, 16)
    assert point(half.float(), out=out) is out
    assert torch.equal(out, wide)
    for dim, along in ((0, qsim.scaling.PerBlock(4, 0)), (0, qsim.scaling.PerRow(0)), (-1, qsim.scaling.PerTensor())):
        x = torch.randn(12, 3)
        expected = turn.inverse(qsim.quantize(turn(x, dim), "e2m1", scale=along), dim)
        assert torch.equal(Quantizer("e2m1", scale=along, transform=turn)(x), expected)


def test_the_gradient_of_a_quantizer_with_a_transform_passes_straight_through() -> None:
    point, g = Quantizer("e4m3", transform=Hadamard(8)), torch.randn(3, 16)
    x = torch.randn(3, 16, requires_grad=True)
    (found,) = torch.autograd.grad(point(x), x, g)
    torch.testing.assert_close(found, g)


def test_transforms_go_to_configurations_and_back() -> None:
    point = Quantizer("nvfp4", "stochastic", transform=Hadamard(16, seed=3))
    assert Quantizer(**point.to_dict()) == point
    assert repr(point.transform) in repr(point)
    assert point != Quantizer("nvfp4", "stochastic")
    assert "transform" not in Quantizer("nvfp4").to_dict()
    assert Quantizer("nvfp4", transform="Hadamard(16)").transform == Hadamard(16)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Hadamard(12), ValueError, "power of two, got 12"),
        (lambda: Hadamard(1), ValueError, "size"),
        (lambda: Hadamard(8, random_signs=1), TypeError, "random_signs"),
        (lambda: Hadamard(8)(torch.arange(8)), TypeError, "float32"),
        (lambda: Hadamard(8)(torch.randn(8), 1), IndexError, "no dimension 1"),
        (lambda: Quantizer("e4m3", transform=8), TypeError, "Hadamard"),
        (lambda: Quantizer("e4m3", transform="Fourier(8)"), ValueError, r"Hadamard\(…\)"),
        (lambda: Quantizer("e4m3", clip_gradient=True, transform=Hadamard(8)), ValueError, "clip_gradient"),
        (lambda: qsim.nn.Quantize(forward=Quantizer("e4m3", transform=Hadamard(8))), ValueError, "cancels only in a product"),
    ],
)
def test_invalid_input_raises_errors(make: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()  # type: ignore[operator]


def test_functional_transforms() -> None:
    hadamard, x, change = Hadamard(16), torch.randn(3, 21), torch.randn(3, 21)
    total = lambda x: (hadamard(x) * change).sum()  # noqa: E731
    torch.testing.assert_close(torch.func.grad(total)(x), hadamard.inverse(change))
    value, moved = torch.func.jvp(hadamard, (x,), (change,))
    assert torch.equal(value, hadamard(x))
    assert torch.equal(moved, hadamard(change))
    assert torch.equal(torch.func.vmap(hadamard)(x), hadamard(x))
    assert torch.equal(torch.func.vmap(hadamard.inverse, in_dims=1, out_dims=1)(x), hadamard.inverse(x, dim=0))
    samples = torch.func.vmap(torch.func.grad(lambda x: (hadamard(x) * x.detach()).sum()))(x)
    torch.testing.assert_close(samples, hadamard.inverse(x))


def test_numbers_of_an_fpu_do_not_round_a_transform() -> None:
    hadamard, x = Hadamard(16), torch.randn(3, 21)
    expected = hadamard(x), hadamard.inverse(x)
    with qsim.fpu("e4m3"):
        found = hadamard(x), hadamard.inverse(x)
    assert all(map(torch.equal, found, expected))


def test_signs_are_not_the_bits_that_noise_is_made_of() -> None:
    words = [word for block in range(16) for word in philox4x32((block, 0, 0, 0), (5, 0))]
    # Sylvester's first row is all ones, so that it shows the signs.
    signs = Hadamard(64, seed=5)(torch.eye(64), 0)[0].sign().tolist()
    assert set(signs) == {1, -1}
    assert signs != [1 - 2 * (word & 1) for word in words]
