"""The conversion of a Hugging Face model in its config, where `save_pretrained` finds it."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

from qsim.nn.converting.description import describe

#: The name of qsim among transformers' quantization methods.
METHOD = "qsim"


class ConversionConfig:
    """The `quantization_config` of a converted model: it describes the model's conversion at the time when the config is written.

    Args:
        model: The model, which is not kept alive.
    """

    quant_method = METHOD

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def to_dict(self) -> dict[str, Any]:
        """The description for `config.json`."""
        model = self._model()
        return {"quant_method": METHOD} | ({} if model is None else describe(model))

    def __deepcopy__(self, memo: dict[int, Any]) -> ConversionConfig | None:
        """Return the config of the copied model; one that is copied without its model may go to another, which is not converted."""
        copied = memo.get(id(self._model()))
        return None if copied is None else ConversionConfig(copied)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = weakref.ref(state["model"])


def note_in_configs(model: nn.Module) -> None:
    """Let the configs of Hugging Face's models describe the conversion: of a model, or of the outermost ones in it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        for each in _outermost(model, modeling.PreTrainedModel):
            each.config.quantization_config = ConversionConfig(each)


def remove_from_configs(model: nn.Module) -> None:
    """Remove what `note_in_configs` wrote."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(getattr(config, "quantization_config", None), ConversionConfig):
            del config.quantization_config


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [module] if isinstance(module, kind) else [found for child in module.children() for found in _outermost(child, kind)]
