"""Schedules, controls and the state of torch's generators for Lightning's Trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback

from qsim.control import Control
from qsim.control.base import checked
from qsim.schedule import Schedule, Schedules

__all__ = ["ControlCallback", "GeneratorCallback", "ScheduleCallback"]


class ScheduleCallback(Callback):  # type: ignore[misc]
    """Let schedules change the points of a module, and options of its optimizer, while Lightning's Trainer trains.

    The Trainer's number of steps is that of the schedules. Its checkpoints contain their state, and `ckpt_path=` continues inside a phase
    to the bit.

    Args:
        schedule: The schedule of the module.
        optimizer: The schedule of the optimizer, if it has one.

    Example:
        >>> import qsim
        >>> from qsim.lightning import ScheduleCallback
        >>> callback = ScheduleCallback(qsim.Schedule({0: "bf16", 0.1: "nvfp4", 0.85: "bf16"}))
        >>> # lightning.pytorch.Trainer(max_epochs=3, callbacks=[callback])
    """

    def __init__(self, schedule: Schedule, optimizer: Schedule | None = None) -> None:
        self._schedules = Schedules(schedule, optimizer)
        self._saved: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the phase of the Trainer's step."""
        total = trainer.estimated_stepping_batches
        if not math.isfinite(total):
            raise ValueError("ScheduleCallback: the Trainer has no last step: give it max_steps or max_epochs")
        # The checkpoint has what a conversion draws, so resuming one leaves the generator alone.
        with torch.random.fork_rng(devices=[], enabled=self._saved is not None):
            self._schedules.start(pl_module, trainer.optimizers[0], int(total), trainer.global_step, self._saved)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Begin the next phase if it is time."""
        self._schedules.seek(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """The state for the Trainer's checkpoint."""
        return self._schedules.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state from a checkpoint, for the start of training."""
        self._saved = state_dict


class ControlCallback(Callback):  # type: ignore[misc]
    """Let controls of `qsim.control` act while Lightning's Trainer trains.

    The Trainer's checkpoints contain their states, and `ckpt_path=` continues inside a window.

    Args:
        *controls: The controls.

    Example:
        >>> import qsim
        >>> from qsim.lightning import ControlCallback
        >>> callback = ControlCallback(qsim.control.OsciReset(period=200), qsim.control.OutControl())
        >>> # lightning.pytorch.Trainer(max_epochs=3, callbacks=[callback])
    """

    def __init__(self, *controls: Control) -> None:
        self._controls = checked(controls)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the controls."""
        for control in self._controls:
            control.start(pl_module)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count the steps of the optimizer: with accumulated gradients not every batch is one."""
        for control in self._controls:
            while control.steps < trainer.global_step:
                control.step()

    def state_dict(self) -> dict[str, Any]:
        """The states for the Trainer's checkpoint."""
        return {"controls": [control.state_dict() for control in self._controls]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states from a checkpoint, for the start of training."""
        for control, state in zip(self._controls, state_dict["controls"], strict=True):
            control.load_state_dict(state)


class GeneratorCallback(Callback):  # type: ignore[misc]
    """Save torch's generators in Lightning's checkpoints, from which layers draw the seeds of their noise, so that runs resume to the bit.

    Lightning does not save them: without this callback, a run that `ckpt_path=` continues draws other noise than the uninterrupted one. Of
    several ranks each saves its own. The generators of Python and NumPy, which qsim does not draw from, are not saved; nor is the place in
    an epoch: to resume inside of one, Lightning needs a loader with `state_dict` and `load_state_dict`, such as torchdata's
    `StatefulDataLoader`, which in the main process must not draw from torch's generators for each batch.

    Example:
        >>> import qsim
        >>> from qsim.lightning import GeneratorCallback
        >>> callback = GeneratorCallback()
        >>> # lightning.pytorch.Trainer(max_epochs=3, callbacks=[callback])
    """

    def __init__(self) -> None:
        self._saved: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks for the Trainer's checkpoint."""
        own, ranks = _generator_states(), _ranks()
        states: list[Any] = [own] * ranks
        if ranks > 1:
            torch.distributed.all_gather_object(states, own)
        return {"ranks": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states from a checkpoint, for the start of training; with another number of ranks, those of rank 0."""
        states = state_dict["ranks"]
        self._saved = states[torch.distributed.get_rank() if _ranks() == len(states) > 1 else 0]
        _restore(self._saved)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore them after the optimizers were made, and before the iterator of the loader is."""
        if self._saved is not None:
            _restore(self._saved)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Restore them again inside of an epoch, for which the loader's iterator drew a seed before the checkpoint and now once more."""
        if self._saved is not None and batch_idx > 0:
            _restore(self._saved)
        self._saved = None


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_available() and torch.distributed.is_initialized() else 1


def _generator_states() -> dict[str, Any]:
    """The states of the default generators of the CPU and of each CUDA device."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _restore(states: Mapping[str, Any]) -> None:
    """Set the default generators of the devices that there are."""
    torch.set_rng_state(states["cpu"])
    for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)
