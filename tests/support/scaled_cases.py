"""Tensors and scales for tests of block formats: difficult blocks, and every way in which elements share a scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim.scaling import NAMED, PerAxis, PerBlock, PerTensor, PerTile, Scaling

#: The names of different block formats.
DIFFERENT = [name for name in NAMED if name not in ("mxfp8", "mxfp6", "mxfp4")]

#: Scales other than those of block formats, all with codes.
SCALINGS: dict[str, Scaling] = {
    "tensor": PerTensor(),
    "tensor in powers of two": PerTensor("e8m0", rule="ceil"),
    "rows": PerAxis(0),
    "columns in bf16": PerAxis(-1, "bf16", margin=1),
    "blocks": PerBlock(5),
    "blocks along the first dimension": PerBlock(3, dim=0, format="e5m2", rule="even"),
    "tiles": PerTile(4, 3),
    "tiles under a scale": PerTile(2, 8, "e4m3", outer=PerTensor()),
}


def hard(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix whose rows differ in size by many powers of two, with zeros, outliers, subnormals and non-finite numbers."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    facts = torch.finfo(dtype)
    exponents = torch.linspace(math.log2(facts.smallest_normal * facts.eps), math.log2(facts.max) - 2, rows, dtype=torch.float64)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * exponents[:, None].exp2()
    x = x.clamp(-facts.max, facts.max).to(dtype)
    x[rows // 2] = 0
    x[rows // 3, : columns // 2] = -0.0
    x[rows // 4, -1] = facts.max
    x[rows // 5, columns // 2] = math.nan
    x[-1, 0] = -math.inf
    return x
