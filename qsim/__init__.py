"""qsim emulates low-precision arithmetic for training neural networks in PyTorch.

Example:
    >>> import torch, qsim
    >>> qsim.quantize(torch.tensor([0.3, 1.7]), "e4m3")
    tensor([0.3125, 1.7500])
"""

import importlib
from typing import TYPE_CHECKING, Any

from qsim import accumulators, formats, nn, random, recipes, rounding, scaling, transforms
from qsim.formats import Fixed, Float, Format, Int, PowerOfTwo, format
from qsim.functional import decode, encode, quantize, quantize_, threshold_quantize
from qsim.functional.backends import Backend, backends
from qsim.functional.matmul import matmul
from qsim.functional.quantizer import Quantizer
from qsim.functional.scaled_codes import ScaledCodes
from qsim.nn import convert, revert
from qsim.nn.converting import serving as _serving
from qsim.recipes.five_point import FivePoint
from qsim.recipes.recipe import Recipe
from qsim.rounding import Rounding, Stochastic
from qsim.scaling.block_formats import Block
from qsim.text.files import FileError

if TYPE_CHECKING:
    from qsim import checkpoints, diagnostics, optim, silicon
    from qsim.checkpoints import export, load, save
    from qsim.functional.fpu import fpu
    from qsim.nn.coverage.run import coverage

__version__ = "0.2.0.dev0"

__all__ = [
    "Backend",
    "Block",
    "FileError",
    "FivePoint",
    "Fixed",
    "Float",
    "Format",
    "Int",
    "PowerOfTwo",
    "Quantizer",
    "Recipe",
    "Rounding",
    "ScaledCodes",
    "Stochastic",
    "accumulators",
    "backends",
    "checkpoints",
    "convert",
    "coverage",
    "decode",
    "diagnostics",
    "encode",
    "export",
    "format",
    "formats",
    "fpu",
    "load",
    "matmul",
    "nn",
    "optim",
    "quantize",
    "quantize_",
    "random",
    "recipes",
    "revert",
    "rounding",
    "save",
    "scaling",
    "silicon",
    "threshold_quantize",
    "transforms",
]


#: Modules imported on first use: not every program needs them, and some need packages that rounding does not.
_LATER = ("checkpoints", "compat", "diagnostics", "optim", "plot", "silicon", "studies")
_LATER_FUNCTIONS = {
    "coverage": "nn.coverage.run",
    "export": "checkpoints",
    "fpu": "functional.fpu",
    "load": "checkpoints",
    "save": "checkpoints",
}


def _dry_runner(action: str, layout: str) -> Any:
    return importlib.import_module(f"{__name__}.checkpoints.dry_runs").dry_runner(action, layout)


#: `convert` asks for it, and checkpoints, which answer, are above it.
_serving.dry_runner = _dry_runner


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LATER_FUNCTIONS:
        return getattr(importlib.import_module(f"{__name__}.{_LATER_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_LATER_FUNCTIONS})
