"""8-bit and 4-bit states in blocks against an Adam written out here, with tables and blocks as bitsandbytes and torchao define them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qsim
from qsim.formats import Dynamic, Table
from qsim.optim import Quantized, block_states
from qsim.scaling import PerBlock, PerRow


def dynamic_map(bits: int, *, signed: bool) -> list[float]:
    """The libraries' construction: decades of interval centres, zero and one."""
    values: list[float] = [0.0, 1.0]
    for i in range(bits - 1):
        edges = np.linspace(0.1, 1, 2**i + 1 if signed else 2 ** (i + 1) + 1)
        centres = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - bits + 2)
        values += [*centres, *(-centres if signed else [])]
    return sorted(values)


@pytest.mark.parametrize(("bits", "signed"), [(8, True), (8, False), (4, True), (4, False)])
def test_tables_are_those_of_the_libraries(bits: int, signed: bool) -> None:
    table, own = dynamic_map(bits, signed=signed), Dynamic(bits, signed).values()
    assert len(own) == 2**bits
    np.testing.assert_allclose(own, table, rtol=1e-7)
    assert Dynamic(bits, signed) == qsim.format(repr(Dynamic(bits, signed)))
    codes = qsim.encode(torch.tensor(own), Dynamic(bits, signed))
    assert codes.tolist() == list(range(2**bits))


def in_blocks(x: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:  # type: ignore[type-arg]
    """The nearest values of a table under the largest magnitude of each block."""
    flat = np.pad(x.ravel(), (0, -x.size % size)).reshape(-1, size)
    scale = np.maximum(np.abs(flat).max(1, keepdims=True), 1e-38)
    nearest = table[np.abs((flat / scale)[..., None] - table).argmin(-1)] * scale
    return nearest.ravel()[: x.size].reshape(x.shape)  # type: ignore[no-any-return]


def test_second_moments_have_no_sign() -> None:
    assert [block_states(bits)["exp_avg_sq"].format for bits in (8, 4)] == [Dynamic(8, signed=False), Table([i / 16 for i in range(1, 17)])]


@pytest.mark.parametrize("bits", [8, 4])
def test_adam_with_states_in_blocks(bits: int) -> None:
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(7, 60))
    size = 256 if bits == 8 else 128
    first = np.array(dynamic_map(bits, signed=True))
    second = np.array(dynamic_map(8, signed=False)) if bits == 8 else np.arange(1, 17) / 16
    optimizer = Quantized(torch.optim.Adam([w], lr=0.01), state=block_states(bits))  # type: ignore[arg-type]
    weight, m, v = w.detach().double().numpy(), np.zeros(w.shape), np.zeros(w.shape)
    for step in range(1, 6):
        gradient = torch.randn(7, 60)
        w.grad = gradient.clone()
        optimizer.step()
        g = gradient.double().numpy()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        weight = weight - 0.01 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        m, v = in_blocks(m, first, size), in_blocks(v, second, size)
        near = torch.isclose(optimizer.state[w]["exp_avg"].double(), torch.from_numpy(m), rtol=1e-4, atol=1e-9)
        assert near.double().mean() > 0.99  # float32 is on the other side of a middle now and then
        torch.testing.assert_close(w.detach().double(), torch.from_numpy(weight), rtol=2e-3, atol=2e-3)


def test_any_format_with_blocks_and_the_same_noise_again() -> None:
    def states(seed: int) -> torch.Tensor:
        w = nn.Parameter(torch.ones(4, 40))
        point = qsim.Quantizer("e4m3", "stochastic", scale=PerBlock(32))
        optimizer = Quantized(torch.optim.SGD([w], 0.1, momentum=0.9), state={"momentum_buffer": point}, seed=seed)
        for step in range(2):
            w.grad = torch.linspace(-1, 1, 160).view(4, 40) * (step + 1)
            optimizer.step()
        return optimizer.state[w]["momentum_buffer"]  # type: ignore[no-any-return]

    assert torch.equal(states(1), states(1))
    assert not torch.equal(states(1), states(2))


class HalfStates(torch.optim.Optimizer):
    """An optimizer that keeps a state in bfloat16, whatever the parameter's dtype."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["exp_avg"] = torch.zeros_like(p, dtype=torch.bfloat16)


def test_errors() -> None:
    w = nn.Parameter(torch.ones(4))
    optimizer = Quantized(HalfStates([w]), state=block_states(8))
    with pytest.raises(TypeError, match=r"states with scales must be float32 or float64, got torch.bfloat16"):
        optimizer.step()
    rows = qsim.Quantizer("e4m3", scale=PerRow())
    with pytest.raises(ValueError, match=r"Quantized: state: optimizers round .* except for states in blocks, got PerRow"):
        Quantized(torch.optim.Adam([w]), state=rows)
    with pytest.raises(ValueError, match=r"Quantized: weight: optimizers round .*, got PerBlock"):
        Quantized(torch.optim.Adam([w]), weight=qsim.Quantizer("e4m3", scale=PerBlock(4)))
    with pytest.raises(ValueError, match="block_states: bits must be 4 or 8, got 6"):
        block_states(6)  # type: ignore[arg-type]
    for wrong in (2, 9, True):
        with pytest.raises((TypeError, ValueError), match="Dynamic: bits must be"):
            Dynamic(wrong)
