"""Layers that round at five points, and the conversion of models to them."""

import importlib
from typing import TYPE_CHECKING, Any

from qsim.nn import functional
from qsim.nn.attention import MultiheadAttention
from qsim.nn.converting.convert import convert, revert
from qsim.nn.converting.table import Conversion, changes, conversion
from qsim.nn.coverage.report import CountedProduct, Coverage
from qsim.nn.modules import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Embedding, Linear
from qsim.nn.quantize import Quantize

if TYPE_CHECKING:
    from qsim.nn.kv_cache import KVCache

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Conversion",
    "CountedProduct",
    "Coverage",
    "Embedding",
    "KVCache",
    "Linear",
    "MultiheadAttention",
    "Quantize",
    "changes",
    "conversion",
    "convert",
    "functional",
    "revert",
]


def __getattr__(name: str) -> Any:
    if name == "KVCache":  # needs transformers, which not every program has
        return importlib.import_module(f"{__name__}.kv_cache").KVCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
