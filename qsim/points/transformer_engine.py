"""NVFP4 in the order of operations of Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim.formats import E2M1, E4M3
from qsim.functional import quantize
from qsim.functional.quantizer import Quantizer
from qsim.points.base import Gradient, PointModule, surrogate
from qsim.points.groups import check_granularity, grouped, ungrouped, within
from qsim.rounding import Rounding
from qsim.scaling import PerBlock, Scaling

#: The seed with which a `Hadamard(16)` changes the signs that Transformer Engine changes.
SIGNS = 56541


class TransformerEngineNVFP4(PointModule):
    """NVFP4 with the bits of Transformer Engine: its reference in plain PyTorch, `NVFP4QuantizerRef`, computes in float32, in this order.

    - the tensor: `encode = 448 * 6 / amax`, at most float32's largest number, and `decode = 1 / encode`;
    - each block: `scale = amax_of_block * (encode * (1 / 6))`, limited to 448 and rounded to the nearest E4M3 number;
    - each element: `x * min(1 / (scale * decode), largest)`, limited to 6 and rounded to E2M1.

    The quotients of a `Quantizer` are rounded less often, so that now and then one of its scales is the neighbour of this one. The gradient
    is straight through.

    Args:
        granularity: The blocks: `PerBlock(16)`, the default, or `PerTile(16, 16)` for weights.
        rounding: How elements are rounded: `"stochastic"` for gradients.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([1.0, 2.9, -0.2, 12.0] * 4)
        >>> qsim.points.TransformerEngineNVFP4()(x)[:4]
        tensor([ 1.,  3., -0., 12.])
    """

    gradient: Gradient = "straight"

    def __init__(self, granularity: Scaling | str | None = None, *, rounding: str | Rounding = "nearest") -> None:
        super().__init__()
        self.granularity = PerBlock(16) if granularity is None else check_granularity("TransformerEngineNVFP4", granularity)
        self.quantizer = Quantizer(E2M1, rounding)
        self.is_directed = isinstance(self.granularity, PerBlock) and self.granularity.dim == -1

    def parts(self, x: Tensor, **noise: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The elements by group, the scales of groups and that of the tensor, whose product is the rounded tensor by group."""
        groups = grouped(x.detach().float(), self.granularity)
        largest = torch.finfo(torch.float32).max
        amax = groups.abs().amax(within(groups), keepdim=True)
        encode = (E4M3.max * E2M1.max / amax.amax()).clamp(max=largest)
        encode = torch.where(encode == 0, 1.0, encode)
        decode = 1.0 / encode
        scales = quantize(amax * (encode * torch.tensor(E2M1.max).reciprocal()), E4M3)
        factors = (1.0 / (scales * decode)).clamp(max=largest)
        return self.quantizer(groups * factors, **noise), scales, decode

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round the blocks."""
        elements, scales, decode = self.parts(x, **noise)
        return surrogate(x, ungrouped(elements * (scales * decode), tuple(x.shape)).to(x.dtype))

    def extra_repr(self) -> str:
        """The blocks and the rounding."""
        return f"{self.granularity}, rounding={self.quantizer.rounding}"
