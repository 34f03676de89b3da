"""`qsim.optim` in Lightning's trainer: mixed precision with gradient clipping, with and without a scaler."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from support.distributed_models import alike

pl = pytest.importorskip("lightning.pytorch", exc_type=ImportError)
amp = pytest.importorskip("lightning.pytorch.plugins.precision", exc_type=ImportError)

CLIP = 2.0**-4
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params, **o: qsim.optim.AdamW(params, lr=2.0**-5, format="bf16", state="fp32", seed=7, **o),
    "SGD": lambda params, **o: qsim.optim.SGD(params, lr=0.5, format="bf16", seed=7, **o),
    "Quantized": lambda params: qsim.optim.Quantized(torch.optim.SGD(params, 0.5), weight=qsim.Quantizer("bf16", "stochastic"), seed=7),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    """A linear layer with a given optimizer; records the norm of its gradients as the optimizer gets them."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.make, self.options = make, options
        self.norms: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        # The third of the four batches overflows under a scale of 2**10 and is skipped with a scaler.
        return self.layer(batch[0]).float().square().mean() * (3e36 if index == 2 and self.trainer.precision_plugin.scaler else 1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.layer.parameters(), **self.options)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm)
        self.norms.append(float(torch.stack([p.grad.float().norm() for p in self.layer.parameters()]).norm()))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 8, generator=generator) for _ in range(4)]


def fitted(module: Module, tmp_path: Path, **options: Any) -> Module:
    """A module after one epoch of four steps."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, gradient_clip_val=CLIP, **options,
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.cat(batches()))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16))
    return module


@pytest.mark.parametrize("name", MAKERS)
def test_bf16_mixed(name: str, tmp_path: Path) -> None:
    module = fitted(Module(MAKERS[name]), tmp_path, precision="bf16-mixed")
    by_hand = Module(MAKERS[name])
    optimizer = by_hand.configure_optimizers()
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = by_hand.layer(batch).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(by_hand.layer.parameters(), CLIP)
        optimizer.step()
    assert alike(list(module.layer.parameters()), list(by_hand.layer.parameters()))
    assert module.norms == pytest.approx([CLIP] * 4, rel=1e-3)


@pytest.mark.parametrize("name", MAKERS)
def test_a_scaler(name: str, tmp_path: Path) -> None:
    """Gradients are clipped after they are unscaled, and a step with infinities is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = amp.MixedPrecision("16-mixed", "cpu", scaler)
    module = fitted(Module(MAKERS[name]), tmp_path, plugins=[plugin])
    by_hand = Module(MAKERS[name])
    optimizer = by_hand.configure_optimizers()
    for index, batch in enumerate(batches()):
        if index == 2:
            continue
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = by_hand.layer(batch).float().square().mean()
        (loss * 2.0**10).backward()
        for p in by_hand.layer.parameters():
            assert p.grad is not None
            p.grad.mul_(2.0**-10)
        nn.utils.clip_grad_norm_(by_hand.layer.parameters(), CLIP)
        optimizer.step()
    assert alike(list(module.layer.parameters()), list(by_hand.layer.parameters()))
    assert scaler.get_scale() == 2.0**9
    assert [module.norms[index] for index in (0, 1, 3)] == pytest.approx([CLIP] * 3, rel=1e-3)


def test_a_fused_step_unscales_by_itself_and_is_not_clipped(tmp_path: Path) -> None:
    """As in torch: Lightning raises an error that names the option instead of clipping scaled gradients."""
    with pytest.raises(RuntimeError, match="'fused' optimizer"):
        fitted(Module(MAKERS["AdamW"], fused=True), tmp_path, precision="bf16-mixed")
