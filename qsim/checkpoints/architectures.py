"""The configuration of a model next to its weights: what Hugging Face's models add to a checkpoint."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
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

    for name, reason in renamed(model, layers).items():
        raise ValueError(f"export: {name}: {reason}")
    return dict(revert_weight_conversion(model, dict(state)))


def renamed(model: nn.Module, layers: Iterable[str]) -> dict[str, str]:
    """The layers whose weights transformers stores differently, and how; they cannot be exported."""
    if not is_hugging_face(model):
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    weights = {name: {f"{name}.weight": model.get_submodule(name).get_parameter("weight")} for name in layers}
    changed = [name for name, weight in weights.items() if list(revert_weight_conversion(model, dict(weight))) != list(weight)]
    return dict.fromkeys(changed, "transformers stores its weight under another name or in pieces: exclude it")


#: The length of rows whose numbers are followed.
_SHORT = 4


def checkpoint_pieces(model: nn.Module, name: str, tensor: Tensor) -> dict[str, tuple[int, range]] | None:
    """The tensors into which a model's checkpoints split one of its tensors, or the one that has another name there.

    Transformers is asked where the rows of a tensor end up, by a tensor of the numbers of its rows, which are short to take little memory.

    Returns:
        For each name in the checkpoint, the index of the matrix, which is 0 if there are no more, and its rows; `None` if the checkpoint
        has the tensor itself, or not its rows in order.
    """
    if not is_hugging_face(model) or not tensor.dim():
        return None
    from transformers.core_model_loading import revert_weight_conversion

    rows = tensor.shape[1] if tensor.dim() > 2 else tensor.shape[0]
    lines = tensor.shape[:2] if tensor.dim() > 2 else tensor.shape[:1]
    row = [min(size, _SHORT) for size in tensor.shape[len(lines) :]]
    numbers = torch.arange(math.prod(lines), device="cpu").view(*lines, *[1] * len(row)).expand(*lines, *row)
    found: dict[str, Tensor] = dict(revert_weight_conversion(model, {name: numbers}))
    if list(found) == [name]:
        return None
    places = {}
    for piece, own in found.items():
        first = int(own.flatten()[0])
        wanted = torch.arange(first, first + len(own), device="cpu").view(-1, *[1] * (own.dim() - 1)).expand(own.shape)
        if list(own.shape[1:]) != row or not torch.equal(own, wanted):
            return None
        places[piece] = first // rows, range(first % rows, first % rows + len(own))
    return places


def write_config(model: nn.Module, folder: Path, quantization: Mapping[str, Any], *, untied: bool = False) -> None:
    """Write `config.json` with a quantization config, and what else Hugging Face's models have.

    Args:
        model: The model.
        folder: The folder.
        quantization: The quantization config.
        untied: Whether the checkpoint has weights of their own for layers that share them in the model.
    """
    config: dict[str, Any] = {}
    if is_hugging_face(model):
        own: Any = model
        own.config.save_pretrained(folder)
        if own.can_generate():
            own.generation_config.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = _with_own_weights(config) if untied else config
        config |= {"architectures": [type(model).__name__], "dtype": str(own.dtype).removeprefix("torch.")}
    config["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _with_own_weights(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and those in it of parts of the model, of a model whose head has a weight of its own."""
    inner = {name: _with_own_weights(value) if isinstance(value, Mapping) else value for name, value in config.items()}
    return {**inner, "tie_word_embeddings": False} if "tie_word_embeddings" in config or "vocab_size" in config else inner
