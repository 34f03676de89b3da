"""The configuration of a model next to its weights: what Hugging Face's models add to a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model is one of transformers, without importing it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def checkpoint_names(model: nn.Module, state: Mapping[str, Tensor], layers: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a model as its checkpoints have them: transformers renames, splits and merges some.

    Args:
        model: The model.
        state: Its tensors without the weights of exported layers.
        layers: The exported layers.

    Raises:
        ValueError: If the weight of an exported layer is one of those.
    """
    if not is_hugging_face(model):
        return dict(state)
    from transformers.core_model_loading import revert_weight_conversion

    for name in layers:
        weight = {f"{name}.weight": model.get_submodule(name).get_parameter("weight")}
        if list(revert_weight_conversion(model, dict(weight))) != list(weight):
            raise ValueError(f"export: transformers stores the weight of {name} under another name or in pieces: exclude it")
    return dict(revert_weight_conversion(model, dict(state)))


def write_config(model: nn.Module, folder: Path, quantization: Mapping[str, Any]) -> None:
    """Write `config.json` with a quantization config, and what else Hugging Face's models have."""
    config: dict[str, Any] = {}
    if is_hugging_face(model):
        own: Any = model
        own.config.save_pretrained(folder)
        if own.can_generate():
            own.generation_config.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= {"architectures": [type(model).__name__], "dtype": str(own.dtype).removeprefix("torch.")}
    config["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
