"""A tiny Llama and transformers' Trainer for it, as a script has them: the same whenever it is started."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers.trainer_utils import get_last_checkpoint

import qsim
from qsim.hugging_face import ScheduleCallback

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXTS = [{"input_ids": row, "labels": row} for row in torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(0))] * 4
PHASES: dict[int | float, Any] = {0: "bf16", 0.25: "nvfp4", 0.75: "bf16"}


def model() -> Any:
    """A model with the same weights in every process."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=40, attn_implementation="qsim"))


def trainer(model: Any, folder: Path, callbacks: Any = (), **options: Any) -> Any:
    """A Trainer of eight steps, which rounds updates stochastically."""
    given = {"per_device_train_batch_size": 4, "max_steps": 8, "learning_rate": 1e-2, "use_cpu": True, "seed": 3}
    silent = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(folder), **{**given, **silent, **options})
    optimizer = qsim.optim.AdamW(model.parameters(), lr=1e-2, update="stochastic", seed=5)
    return transformers.Trainer(model, arguments, train_dataset=TEXTS, optimizers=(optimizer, None), callbacks=[*callbacks])


def scheduled(phases: dict[int | float, Any] = PHASES) -> ScheduleCallback:
    """A schedule of the model's points, and one of the optimizer's updates."""
    return ScheduleCallback(qsim.Schedule(phases), qsim.Schedule({0: {"update": "stochastic"}, 5: {"update": "kahan"}}))


class Kill(transformers.TrainerCallback):  # type: ignore[misc]
    """Kills its own process in a step, between the backward pass and the update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called with the number of steps before this one."""
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, killed_in: int | None = None) -> None:
    """A script that trains for twelve steps from its last checkpoint, and saves one every second step; it may be killed in a step.

    At the end it writes all losses, and the tensors of the model and of the optimizer, to `end.pt`.
    """
    callbacks = [scheduled(), *([] if killed_in is None else [Kill(killed_in)])]
    own = trainer(model(), folder, callbacks, max_steps=12, save_strategy="steps", save_steps=2)
    own.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)
    losses = [torch.tensor(entry["loss"]) for entry in own.state.log_history if "loss" in entry]
    states = tree_leaves([own.model.state_dict(), own.optimizer.state_dict()])
    torch.save([*losses, *(x for x in states if isinstance(x, torch.Tensor))], folder / "end.pt")
