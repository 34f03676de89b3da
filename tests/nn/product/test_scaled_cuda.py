"""Layers with scales on a GPU: the same operands as on the CPU, products that differ only by summation error, and replayable graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import recipes
from qsim.cli.bench._timing import replay
from qsim.recipes import Recipe
from qsim.scaling import Delayed, PerRow

pytestmark = pytest.mark.gpu

RECIPES = {
    "fp8_hybrid": recipes.fp8_hybrid(),
    "fp8_hybrid, rows": recipes.fp8_hybrid(PerRow()),
    "fp8_hybrid, delayed": recipes.fp8_hybrid(Delayed(4)),
    "fp8_blockwise": recipes.fp8_blockwise(),
    "mxfp8": recipes.mxfp8(),
    "mxfp6": recipes.mxfp6(),
    "mxfp4": recipes.mxfp4(),
    "nvfp4": recipes.nvfp4().with_(last=0),
    "int8": recipes.int8(),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def results(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """The output of a layer and all of its gradients, with noise from a seed."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(g)
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def twins(make: type[nn.Module], sizes: tuple[int, ...], recipe: Recipe, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The same layer on both devices, with the same seed for its weight's noise: copies would draw different ones."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return make(*sizes, points=recipe.points, dtype=dtype)

    return made(), made().cuda()


def check(one: list[Tensor], other: list[Tensor], dtype: torch.dtype) -> None:
    """Allow for sums of this many terms, which differ by some units of float32, and for rounding to the dtype of the result."""
    unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-16
    for a, b in zip(one, other, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(b.cpu(), a, rtol=unit, atol=unit * float(a.abs().max()))


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [(64,), (3, 37)])
def test_linear(recipe: Recipe, dtype: torch.dtype, tokens: tuple[int, ...]) -> None:
    one, other = twins(qsim.nn.Linear, (96, 80), recipe, dtype)
    for scale in (1.0, 3e-3):  # delayed scales depend on the previous call
        x, g = (scale * torch.randn(*tokens, 96)).to(dtype), torch.randn(*tokens, 80).to(dtype)
        x.view(-1)[::50] *= 30
        check(results(one, x, g), results(other, x.cuda(), g.cuda()), dtype)


@every_recipe
def test_convolution(recipe: Recipe) -> None:
    one, other = twins(qsim.nn.Conv2d, (20, 24, 3), recipe, torch.float32)
    x, g = torch.randn(6, 20, 9, 11), torch.randn(6, 24, 7, 9)
    check(results(one, x, g), results(other, x.cuda(), g.cuda()), torch.float32)


@every_recipe
def test_layers_do_not_wait_for_the_gpu(recipe: Recipe) -> None:
    _, layer = twins(qsim.nn.Linear, (64, 48), recipe, torch.bfloat16)
    x, g = torch.randn(40, 64, device="cuda", dtype=torch.bfloat16), torch.randn(40, 48, device="cuda", dtype=torch.bfloat16)
    results(layer, x, g)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(layer, x, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_recipe
def test_replayed_graphs_see_new_inputs(recipe: Recipe) -> None:
    if any(isinstance(getattr(point, "scale", None), Delayed) for point in (recipe.points.act, recipe.points.grad)):
        pytest.skip("a history grows with every call")
    _, layer = twins(qsim.nn.Linear, (64, 48), recipe, torch.float32)
    x, g, found = torch.randn(128, 64, device="cuda"), torch.randn(128, 48, device="cuda"), torch.zeros(48, 64, device="cuda")

    def step() -> None:
        found.copy_(torch.autograd.grad(layer(x), layer.weight, g)[0])

    again = replay(step)
    for _ in range(2):
        x.normal_()
        again()
        replayed = found.clone()
        step()
        # Noise is drawn again; for FP4 its norm is a tenth of the total or more.
        assert 0 < (replayed - found).norm() / found.norm() + 1e-9 < 0.5
