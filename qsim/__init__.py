"""qsim emulates low-precision arithmetic for training neural networks in PyTorch.

Example:
    >>> import torch, qsim
    >>> qsim.quantize(torch.tensor([0.3, 1.7]), "e4m3")
    tensor([0.3125, 1.7500])
"""

import importlib
from typing import TYPE_CHECKING, Any

from qsim import accumulators, formats, functional, nn, random, recipes, rounding, scaling, transforms
from qsim.formats import Fixed, Float, Int, format
from qsim.functional import decode, encode, quantize, quantize_
from qsim.functional.matmul import matmul
from qsim.functional.quantizer import Quantizer
from qsim.nn import convert, revert
from qsim.nn.converting import serving as _serving
from qsim.recipes.five_point import FivePoint
from qsim.rounding import Stochastic
from qsim.scaling.block_formats import Block
from qsim.text.files import FileError

if TYPE_CHECKING:
    from qsim import checkpoints, diagnostics, distributed, optim, points, silicon
    from qsim.checkpoints import export, load, save
    from qsim.diagnostics.assignment.assign import assign
    from qsim.diagnostics.rollout.twin import twin
    from qsim.diagnostics.traces.compare import compare
    from qsim.functional.fpu import fpu
    from qsim.nn.coverage.run import coverage
    from qsim.schedule import Schedule

__version__ = "0.2.0.dev0"

__all__ = [
    "Block",
    "FileError",
    "FivePoint",
    "Fixed",
    "Float",
    "Int",
    "Quantizer",
    "Schedule",
    "Stochastic",
    "accumulators",
    "assign",
    "checkpoints",
    "compare",
    "convert",
    "coverage",
    "decode",
    "diagnostics",
    "distributed",
    "encode",
    "export",
    "format",
    "formats",
    "fpu",
    "functional",
    "load",
    "matmul",
    "nn",
    "optim",
    "points",
    "quantize",
    "quantize_",
    "random",
    "recipes",
    "revert",
    "rounding",
    "save",
    "scaling",
    "silicon",
    "transforms",
    "twin",
]


#: Modules imported on first use: not every program needs them, and some need packages that rounding does not.
_LATER = ("checkpoints", "compat", "control", "diagnostics", "distributed", "optim", "plot", "points", "silicon", "studies")
_LATER_FUNCTIONS = {
    "Schedule": "schedule",
    "assign": "diagnostics",
    "compare": "diagnostics",
    "coverage": "nn.coverage.run",
    "export": "checkpoints",
    "fpu": "functional.fpu",
    "load": "checkpoints",
    "save": "checkpoints",
    "twin": "diagnostics",
}
#: Names that were here before 1.0 and where they are now, for error messages.
_MOVED = {
    "Backend": "diagnostics",
    "Format": "formats",
    "PowerOfTwo": "formats",
    "Recipe": "recipes",
    "Rounding": "rounding",
    "ScaledCodes": "functional",
    "backends": "diagnostics",
    "threshold_quantize": "functional",
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
    hint = f": it is qsim.{_MOVED[name]}.{name}" if name in _MOVED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_LATER_FUNCTIONS})
