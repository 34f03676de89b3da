"""Accelerate with converted models: its precisions, its accumulation, and its saved state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer
from support.comparing import same_bits

accelerate: Any = pytest.importorskip("accelerate")

NOISY = FivePoint("e4m3", Quantizer("e4m3", "stochastic"), act_bwd="same", weight_bwd="same", grad=Quantizer("e5m2", "stochastic"))
STEPS = 6


class Run:
    """A converted model, its optimizer and batches, prepared by an accelerator."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, project_dir=folder, **options)
        model = qsim.convert(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), NOISY)
        optimizer = qsim.optim.AdamW(model.parameters(), lr=1e-2, update="stochastic", seed=5)
        x = torch.randn(32, 16)
        batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), 8)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(model, optimizer, batches)

    def steps(self, count: int) -> list[float]:
        """The losses of some epochs."""
        return [sum(self._step(x, y) for x, y in self.batches) for _ in range(count)]

    def _step(self, x: Tensor, y: Tensor) -> float:
        with self.accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(x), y)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    @property
    def weights(self) -> list[Tensor]:
        return list(self.accelerator.unwrap_model(self.model).parameters())


@pytest.fixture(autouse=True)
def _one_accelerator() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 2}], ids=str)
def test_it_trains(options: dict[str, Any], tmp_path: Path) -> None:
    losses = Run(tmp_path, **options).steps(STEPS)
    assert losses[-1] < 0.9 * losses[0]


def test_a_loaded_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = Run(tmp_path)
    whole.steps(2)
    whole.accelerator.save_state(str(tmp_path / "state"))
    whole.steps(2)
    resumed = Run(tmp_path)
    resumed.accelerator.load_state(str(tmp_path / "state"))
    resumed.steps(2)
    assert all(map(same_bits, whole.weights, resumed.weights))
