"""Ready-made settings for whole models, named after the papers and formats that they come from.

Example:
    >>> import torch, qsim
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
    >>> _ = qsim.convert(model, qsim.recipes.mxfp8())
    >>> model[0].points.grad.scale
    PerBlock(size=32, dim=-1, format='e8m0', rule='ceil')
    >>> qsim.recipes.NAMED["mxfp8"] is qsim.recipes.mxfp8
    True
    >>> def gradients_in(point: qsim.recipes.PointLike) -> qsim.FivePoint:
    ...     return qsim.FivePoint(grad=point)
    >>> print(gradients_in("e5m2"))
    grad=e5m2
"""

from __future__ import annotations

from qsim.functional.callables import CallablePoint
from qsim.recipes.any_format import nearest_everywhere, stochastic_backward, weight_only
from qsim.recipes.five_point import PointLike
from qsim.recipes.fp4 import four_over_six, fp4_dge, ms_eden, quartet2, tetrajet2
from qsim.recipes.learned import lsq, quest
from qsim.recipes.microscaling import mxfp4, mxfp6, mxfp8, nvfp4, te_nvfp4, ufp4
from qsim.recipes.named import NAMED, describe, listing, resolve
from qsim.recipes.recipe import Recipe
from qsim.recipes.whole_tensors import deepseek_v3, fp8_blockwise, fp8_hybrid, hfp8, int8, luq, torchao_rowwise

__all__ = [
    "NAMED",
    "CallablePoint",
    "PointLike",
    "Recipe",
    "deepseek_v3",
    "describe",
    "four_over_six",
    "fp4_dge",
    "fp8_blockwise",
    "fp8_hybrid",
    "hfp8",
    "int8",
    "listing",
    "lsq",
    "luq",
    "ms_eden",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "nearest_everywhere",
    "nvfp4",
    "quartet2",
    "quest",
    "resolve",
    "stochastic_backward",
    "te_nvfp4",
    "tetrajet2",
    "torchao_rowwise",
    "ufp4",
    "weight_only",
]
