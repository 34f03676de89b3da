"""NVFP4 byte for byte as Transformer Engine's reference defines it, written in numpy's float32, which shares no code with the library."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import qsim
from qsim.points import TransformerEngineNVFP4
from qsim.points.transformer_engine import SIGNS
from qsim.scaling import PerTile
from qsim_kernels.numbers.scales import Turn
from qsim_kernels.torch.hadamard import signs_of

F32 = np.float32
#: Transformer Engine's signs.
TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def reference(x: np.ndarray[Any, Any], height: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The bytes of E2M1 elements, one each, and those of E4M3 scales, one for each row and 16 columns."""
    blocks = x.reshape(x.shape[0], -1, 16)
    amax = np.abs(blocks).max(-1)
    if height > 1:
        amax = amax.reshape(-1, height, amax.shape[1]).max(1).repeat(height, 0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        encode = min(F32(448) * F32(6) / amax.max(), np.finfo(F32).max)
        decode = F32(1) / encode
        scales = np.minimum(amax * (encode * (F32(1) / F32(6))), F32(448)).astype(ml_dtypes.float8_e4m3fn)
        factor = np.minimum(F32(1) / (scales.astype(F32) * decode), np.finfo(F32).max)
        elements = np.clip(blocks * factor[..., None], F32(-6), F32(6)).astype(ml_dtypes.float4_e2m1fn)
    return elements.reshape(x.shape).view(np.uint8), scales.view(np.uint8)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    spread = torch.randn(64, 128) * torch.logspace(-6, 3, 64)[:, None]
    halves = torch.randint(-24, 25, (32, 64)) / 4.0
    halves[0, 0] = 6 * 448.0
    zeros = torch.randn(32, 64) * (torch.arange(32) % 2)[:, None]
    return {
        "normal": torch.randn(64, 256),
        "spread": spread,
        "ties": halves,
        "zeros": zeros,
        "all zero": torch.zeros(16, 32),
        "tiny": torch.randn(16, 32) * 1e-37,
        "huge": torch.randn(16, 32) * 1e37,
    }


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("height", [1, 16])
def test_bytes_are_those_of_the_reference(name: str, height: int) -> None:
    x = tensors()[name]
    point = TransformerEngineNVFP4(PerTile(16, 16) if height == 16 else None)
    elements, scales, decode = point.parts(x)
    codes, of_blocks = reference(x.numpy(), height)
    mine = elements.reshape(x.shape).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(mine, codes)
    own = scales.reshape(-1, x.shape[1] // 16).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(own.repeat(height, 0), of_blocks)
    products = (elements * (scales * decode)).reshape(x.shape)
    assert torch.equal(point(x), products)


def test_signs_are_those_of_transformer_engine() -> None:
    assert signs_of(Turn(16, 0, 0, SIGNS)) == TE_SIGNS
    x = torch.randn(3, 32)
    rows = [[1.0]]
    while len(rows) < 16:
        rows = [[*row, *row] for row in rows] + [[*row, *(-number for number in row)] for row in rows]
    matrix = torch.tensor(TE_SIGNS, dtype=torch.float32)[:, None] * torch.tensor(rows) / 4
    torch.testing.assert_close(qsim.transforms.Hadamard(16, seed=SIGNS)(x), (x.view(-1, 16) @ matrix).view(3, 32))


def test_the_recipe_rounds_at_the_same_points_as_the_usual_one() -> None:
    te, usual = qsim.recipes.te_nvfp4(), qsim.recipes.nvfp4()
    x, w, g = torch.randn(32, 64), torch.randn(48, 64), torch.randn(32, 48)

    def gradients(recipe: qsim.recipes.Recipe) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        y = qsim.nn.functional.linear(*leaves, points=recipe)
        return [y.detach(), *torch.autograd.grad(y, leaves, g)]

    for one, other in zip(gradients(te), gradients(usual), strict=True):
        assert (one - other).norm() < 0.4 * other.norm()
    assert torch.equal(gradients(te)[0], TransformerEngineNVFP4()(x) @ TransformerEngineNVFP4(PerTile(16, 16))(w).T)
