"""Checkpoints with everything a run needs to resume as if it had never stopped, on any number of processes.

Each is in its own folder, written by torch.distributed.checkpoint, which writes its list of contents last: a folder without that list was
not written completely.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gpt.methods import Updates
from gpt.world import World

LAST = -1
LIST = ".metadata"


def claim(folder: Path, settings: dict[str, Any], resume: int | None, world: World) -> int:
    """Claim a folder for a run, or check that it belongs to it; return the number of steps done.

    Args:
        folder: Where the checkpoints are.
        settings: The settings that must be the same when the run is resumed.
        resume: None to begin a run, `LAST` to resume from the last checkpoint, or the step to resume from.
        world: All processes.
    """
    path = folder / "settings.json"
    if resume is None:
        if world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ValueError(f"--checkpoint: {folder} is not empty; --resume continues the run in it")
            path.write_text(json.dumps(settings))
        return 0
    if not path.exists():
        raise ValueError(f"--resume: {folder} holds no run")
    there = json.loads(path.read_text())
    others = [f"{name} {there.get(name)}, not {value}" for name, value in settings.items() if there.get(name) != value]
    if others:
        raise ValueError(f"--resume: the run in {folder} has {'; '.join(others)}")
    done = sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob(f"step-*/{LIST}"))
    if not done or resume not in (LAST, *done):
        raise ValueError(f"--resume: {folder} holds the steps {done}" + ("" if resume == LAST else f", not {resume}"))
    return done[-1] if resume == LAST else resume


def save(folder: Path, step: int, updates: Updates, world: World) -> None:
    """Write the state after a number of steps."""
    place = _place(folder, step)
    if world.rank == 0:
        # A run that was resumed from an earlier step gets here again.
        (place / LIST).unlink(missing_ok=True)
    with _without_warnings():
        checkpoint.save(_state(updates, step), storage_writer=FileSystemWriter(place, overwrite=True), no_dist=not world.several)


def load(folder: Path, step: int, updates: Updates, world: World) -> None:
    """Read the state after a number of steps."""
    state = _state(updates, step)
    with _without_warnings():
        checkpoint.load(state, checkpoint_id=_place(folder, step), no_dist=not world.several)
    set_state_dict(updates.owner, updates.optimizer, model_state_dict=state["weights"], optim_state_dict=state["optimizer"])
    updates.hand_down()
    torch.set_rng_state(state["random"])


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress torch's warnings about things done on purpose: working in a single process, and overwriting existing files."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled|Detected an existing checkpoint")
        yield


def _state(updates: Updates, step: int) -> dict[str, Any]:
    weights, optimizer = get_state_dict(updates.owner, updates.optimizer)
    # The position of a step's text depends only on the step, so the number of steps is the position in the data.
    return {"weights": weights, "optimizer": optimizer, "step": step, "random": torch.get_rng_state()}


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06}"
