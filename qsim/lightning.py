"""Schedules and controls for Lightning's Trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from qsim.control import Control
from qsim.control.base import checked
from qsim.schedule import Schedule, Schedules

__all__ = ["ControlCallback", "ScheduleCallback"]


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
