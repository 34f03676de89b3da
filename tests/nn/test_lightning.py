"""Lightning's trainer with converted models, in three precisions, and from its checkpoint."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer
from support.comparing import same_bits

pl = pytest.importorskip("lightning.pytorch", exc_type=ImportError)

NOISY = FivePoint("e4m3", Quantizer("e4m3", "stochastic"), act_bwd="same", weight_bwd="same", grad=Quantizer("e5m2", "stochastic"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    """A converted model; records its losses."""

    def __init__(self, points: Any = NOISY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = qsim.convert(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), points)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0].to(self.model[0].weight.dtype)).float(), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return qsim.optim.AdamW(self.model.parameters(), lr=1e-2, update="stochastic", seed=5)


def fit(module: Module, folder: Path, epochs: int, precision: Any = "32-true", callbacks: Any = (), **options: Any) -> Any:
    torch.manual_seed(1)
    x = torch.randn(32, 16)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), 8)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, default_root_dir=folder, precision=precision, callbacks=[*callbacks], **silent
    )
    trainer.fit(module, batches, **options)
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_it_trains(precision: str, tmp_path: Path) -> None:
    module = Module()
    fit(module, tmp_path, 6, precision)
    assert sum(module.losses[-4:]) < 0.9 * sum(module.losses[:4])
    assert module.model[0].weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert len(qsim.nn.conversion(module).changed) == 2


def test_a_checkpoint_has_the_weights_and_the_optimizer(tmp_path: Path) -> None:
    module, again = Module(), Module()
    trainer = fit(module, tmp_path, 2)
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    resumed = fit(again, tmp_path, 2, ckpt_path=str(tmp_path / "state.ckpt"))
    assert resumed.global_step == trainer.global_step
    assert all(map(same_bits, module.parameters(), again.parameters()))
    assert all(map(same_bits, map(module.model, [torch.ones(2, 16)]), map(again.model, [torch.ones(2, 16)])))


class Reached(pl.Callback):  # type: ignore[misc, name-defined]
    """Interrupts a run after a step, and writes its checkpoint."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


# A loader begins again with an epoch, which has 4 steps.
@pytest.mark.parametrize("stop", [4, 12, 20])
def test_a_schedule_goes_on_to_the_bit_inside_each_phase(stop: int, tmp_path: Path) -> None:
    from qsim.lightning import ScheduleCallback

    # Its weights are rounded stochastically, by a seed that the checkpoint has; its activations are not.
    noisy = FivePoint("e4m3", Quantizer("e4m3", "stochastic"), grad="e5m2")

    def scheduled() -> Any:
        updates = qsim.Schedule({0: {"update": "stochastic"}, 10: {"update": "kahan"}})
        return ScheduleCallback(qsim.Schedule({0: "bf16", 0.25: noisy, 0.75: "bf16"}), updates)

    whole, half, again = (Module(FivePoint()) for _ in range(3))
    path = tmp_path / "state.ckpt"
    fit(whole, tmp_path, 6, callbacks=[scheduled()])
    fit(half, tmp_path, 6, callbacks=[scheduled(), Reached(stop, path)])
    fit(again, tmp_path, 6, callbacks=[scheduled()], ckpt_path=str(path))
    assert len(half.losses) == stop
    assert again.losses == whole.losses[stop:]
    assert all(map(same_bits, whole.parameters(), again.parameters()))


class InOrder:
    """A loader that saves its place in an epoch, as torchdata's `StatefulDataLoader` does."""

    def __init__(self) -> None:
        self._done = 0
        self._x = torch.randn(32, 16, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[Tensor]]:
        self._done %= 4
        while self._done < 4:
            x = self._x[8 * self._done : 8 * self._done + 8]
            self._done += 1
            yield [x, x[:, :4].argmax(1)]

    def state_dict(self) -> dict[str, int]:
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._done = state["done"]


def shuffled() -> torch.utils.data.DataLoader[Any]:
    """A loader that draws the order of each epoch, and the seed of its workers, from torch's generator."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), 8, shuffle=True)


class KilledError(Exception):
    """The end of a run that is killed."""


class KilledAfter(Reached):
    """Writes a checkpoint after a step, and ends the run in the next one."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > self.step:
            raise KilledError
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def losses_of(folder: Path, loader: Any, callbacks: list[Any], **options: Any) -> tuple[list[float], list[Tensor]]:
    """The losses and the final weights of a run of two epochs in MXFP4 or, with a schedule, of one that begins in BF16."""
    module = Module(FivePoint() if any(type(own).__name__ == "ScheduleCallback" for own in callbacks) else qsim.recipes.mxfp4())
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=folder, callbacks=callbacks, **silent)
    with contextlib.suppress(KilledError):
        trainer.fit(module, loader, **options)
    return module.losses, [weight.detach().clone() for weight in module.parameters()]


@pytest.mark.parametrize("scheduled", [False, True], ids=["mxfp4", "schedule"])
@pytest.mark.parametrize(("make_loader", "stop"), [(InOrder, 2), (InOrder, 6), (shuffled, 4)], ids=["inside 1", "inside 2", "between"])
def test_a_killed_run_resumes_to_the_bit_in_an_epoch_and_between_two(make_loader: Any, stop: int, scheduled: bool, tmp_path: Path) -> None:
    """Also if whatever happens before it resumes has drawn from torch's generators."""
    from qsim.lightning import GeneratorCallback, ScheduleCallback

    def callbacks() -> list[Any]:
        phases = {0: "bf16", 0.2: qsim.recipes.mxfp4(), 0.9: "bf16"}
        return [GeneratorCallback(), *([ScheduleCallback(qsim.Schedule(phases))] if scheduled else [])]

    path = tmp_path / "state.ckpt"
    torch.manual_seed(1)
    losses, weights = losses_of(tmp_path, make_loader(), callbacks())
    torch.manual_seed(1)
    killed, _ = losses_of(tmp_path, make_loader(), [*callbacks(), KilledAfter(stop, path)])
    assert killed == losses[: stop + 1]
    torch.manual_seed(2)
    resumed, ends = losses_of(tmp_path, make_loader(), callbacks(), ckpt_path=str(path))
    assert resumed == losses[stop:]
    assert all(map(same_bits, weights, ends))
    # Lightning's own checkpoints have no generators.
    torch.manual_seed(2)
    others, _ = losses_of(tmp_path, make_loader(), callbacks()[1:], ckpt_path=str(path))
    assert others != losses[stop:]


def test_a_schedule_needs_a_last_step(tmp_path: Path) -> None:
    from qsim.lightning import ScheduleCallback

    with pytest.raises(ValueError, match="ScheduleCallback: the Trainer has no last step: give it max_steps or max_epochs"):
        fit(Module(), tmp_path, -1, callbacks=[ScheduleCallback(qsim.Schedule({0: "bf16"}))])
