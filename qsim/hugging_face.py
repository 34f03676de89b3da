"""Hugging Face's `from_pretrained` converts a model as the saved one was: importing this module registers qsim with transformers.

`save_pretrained` writes the conversion of a model into its `config.json`, as `quantization_config`. Without this module, `from_pretrained`
warns that it does not know the quantization type `qsim`, and loads the weights only.

Example:
    >>> import tempfile, torch, qsim.hugging_face
    >>> from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    >>> model = qsim.convert(GPT2LMHeadModel(config), "mxfp8", exclude=["lm_head"])
    >>> folder = tempfile.mkdtemp()
    >>> model.save_pretrained(folder)
    >>> loaded = AutoModelForCausalLM.from_pretrained(folder)
    >>> qsim.nn.conversion(loaded) == qsim.nn.conversion(model)
    True

`ScheduleCallback` changes the points of a model while transformers' Trainer trains it, and `ControlCallback` lets a control act.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel, TrainerCallback
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils.quantization_config import QuantizationConfigMixin

from qsim.control import Control
from qsim.control.base import checked
from qsim.nn.calls.attention import attention
from qsim.nn.converting.checks import OWN
from qsim.nn.converting.configs import METHOD, note_in_configs
from qsim.nn.converting.from_description import check_description, convert_as_described
from qsim.nn.histories import RemembersAmaxes, histories_of
from qsim.schedule import Schedule, Schedules
from qsim.text.files import reading, whole_file

__all__ = ["ControlCallback", "ScheduleCallback"]


class DescribedConversion(QuantizationConfigMixin):  # type: ignore[misc]
    """The conversion in a `config.json`.

    Args:
        description: The entries of the conversion's description.

    Raises:
        ValueError: If these are not entries of a description, such as the name of a recipe.
    """

    def __init__(self, **description: Any) -> None:
        unknown = sorted(description.keys() - {"quant_method", "version", "points", "layers", "calls"})
        if "version" not in description and unknown:
            raise ValueError(
                f"quantization_config has {', '.join(unknown)}, and for quant_method='qsim' it is what save_pretrained writes for a "
                "converted model: to round by a recipe, load the model without it and call qsim.convert(model, recipe)"
            )
        self.description = {name: value for name, value in description.items() if name != "quant_method"}
        self.quant_method = METHOD

    def to_dict(self) -> dict[str, Any]:
        """The entries again."""
        return {"quant_method": METHOD, **self.description}


class Converter(HfQuantizer):  # type: ignore[misc]
    """Converts a model before its weights, and the histories of its delayed scales, are loaded."""

    quantization_config: DescribedConversion

    def is_serializable(self) -> bool:
        """The state of a converted model has the tensors of the plain one."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: converted models can be trained."""
        return True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        description = self.quantization_config.description
        file = Path(getattr(model, "name_or_path", ""), "config.json")
        with reading("from_pretrained", f"quantization_config given or in {file}"):
            check_description(description)
        convert_as_described(model, _renamed(description, model))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for module in model.modules():
            if isinstance(module, RemembersAmaxes):
                for history in histories_of(module).values():
                    history.loaded(module.get_buffer(history.names[1]))
        # From here on it is a model like any that qsim.convert has changed: with parameters that train, move and change their dtype.
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config._is_quantized = False
        note_in_configs(model)
        return model


class ScheduleCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Let schedules change the points of a model, and options of its optimizer, while transformers' Trainer trains.

    The Trainer's number of steps is that of the schedules. Its checkpoints contain their state, and `resume_from_checkpoint` continues
    inside a phase to the bit. If a phase has delayed scales, resume with the model of `from_pretrained(checkpoint)`, which has their
    histories.

    Args:
        schedule: The schedule of the model.
        optimizer: The schedule of the optimizer, if it has one.

    Example:
        >>> import qsim
        >>> from qsim.hugging_face import ScheduleCallback
        >>> callback = ScheduleCallback(qsim.Schedule({0: "bf16", 0.1: "nvfp4", 0.85: "bf16"}))
        >>> # transformers.Trainer(model, arguments, train_dataset=…, callbacks=[callback])
    """

    def __init__(self, schedule: Schedule, optimizer: Schedule | None = None) -> None:
        self._schedules = Schedules(schedule, optimizer)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        """Begin the phase of the Trainer's step."""
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes")
        # Accelerate wraps the optimizer.
        self._schedules.start(model, getattr(optimizer, "optimizer", optimizer), state.max_steps, state.global_step, saved)
        state.stateful_callbacks[type(self).__name__] = self.state()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the next phase if it is time."""
        self._schedules.seek(state.global_step)

    def state(self) -> dict[str, Any]:
        """The state for the Trainer's checkpoint."""
        return {"args": {}, "attributes": self._schedules.state_dict()}


class ControlCallback(TrainerCallback):  # type: ignore[misc]
    """Let controls of `qsim.control` act while transformers' Trainer trains.

    Each process writes their states into the Trainer's checkpoint, next to the state of its random numbers: `qsim_controls_0.pt`.
    `resume_from_checkpoint` reads them from the checkpoint of that step in the Trainer's output folder and continues inside a window. For a
    checkpoint from elsewhere, load each control's state before the Trainer resumes.

    Args:
        *controls: The controls.

    Example:
        >>> import qsim
        >>> from qsim.hugging_face import ControlCallback
        >>> callback = ControlCallback(qsim.control.OsciReset(period=200), qsim.control.OutControl())
        >>> # transformers.Trainer(model, arguments, train_dataset=…, callbacks=[callback])
    """

    def __init__(self, *controls: Control) -> None:
        self._controls = checked(controls)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Start the controls, or continue where the checkpoint is from which the Trainer resumes."""
        if any(one.steps != state.global_step for one in self._controls):
            self._load(_states_file(args, state))
        for one in self._controls:
            one.start(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a step of the optimizer."""
        for one in self._controls:
            one.step()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the states into the checkpoint that the Trainer has written."""
        file = _states_file(args, state)
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as draft:
            torch.save([one.state_dict() for one in self._controls], draft)

    def _load(self, file: Path) -> None:
        if not file.is_file():
            raise FileNotFoundError(
                f"ControlCallback: there is no {file}, which holds the controls' states at the step where the Trainer resumes: load each "
                "control's state first, with control.load_state_dict"
            )
        with reading("ControlCallback", file):
            states = torch.load(file, map_location="cpu", weights_only=True)
            for one, saved in zip(self._controls, states, strict=True):
                one.load_state_dict(saved)


def _states_file(args: Any, state: Any) -> Path:
    """The file of a process for the states of controls, in the Trainer's checkpoint of a step."""
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", f"qsim_controls_{args.process_index}.pt")


def _renamed(description: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """A description with the names that the layers have in a model: transformers loads a head's checkpoint into a base model, and back."""
    prefix, names = f"{model.base_model_prefix}.", {name for name, _ in model.named_modules()}
    named: dict[str, dict[str, Any]] = {kind: description.get(kind, {}) for kind in ("layers", "calls")}
    known = [name for facts in named.values() for name in facts]
    if all(name in names for name in known):
        return dict(description)
    if any(prefix + name in names for name in known):
        return {**description, **{kind: {prefix + name: facts for name, facts in of.items()} for kind, of in named.items()}}
    if not any(name.startswith(prefix) for name in known):
        return dict(description)
    inner = {
        kind: {name.removeprefix(prefix): facts for name, facts in of.items() if name.startswith(prefix)} for kind, of in named.items()
    }
    return {**description, **inner}


if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(METHOD)(DescribedConversion)
    register_quantizer(METHOD)(Converter)

AttentionInterface.register(OWN, attention)
AttentionMaskInterface.register(OWN, eager_mask)
# Experts sorted by tokens: each product with a group of rows is one of those that qsim.convert rounds.
ExpertsInterface.register(OWN, grouped_mm_experts_forward)
