"""MS-EDEN: rounding to nearest whose bias the scales of blocks correct."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qsim.formats import E2M1, E4M3
from qsim.formats.base import check_integer
from qsim.functional import quantize
from qsim.points.base import Gradient, PointModule, divided, surrogate, wide

#: Elements of a block.
_BLOCK = 16
#: What the largest element of a block is scaled to, before E4M3 rounds the scale: beyond 6, where clipping costs less than it gains.
_TARGET = E2M1.max / (0.93 * 17 / 16)
#: The scale of the largest block, which leaves room for its correction.
_REACH = 255.99


class MSEden(PointModule):
    """NVFP4 with nearest elements and corrected, stochastic scales: Panferov et al., arXiv 2601.22813, and the code of Quartet II.

    Blocks of 16 along the last dimension are rounded to nearest E2M1 under E4M3 scales `s`, which are under one of the tensor. Each group
    of `size` elements has a correction `c = <x, x> / <x, Q(x)>`, and the scales of its blocks become `s * c`, rounded stochastically to
    E4M3. With a Hadamard transform of `size` whose signs are drawn at every call, `Rotated(MSEden(size), Hadamard(size), "call")`, the
    mean over signs and scales is the tensor, and the variance is about half of that of stochastic elements. The gradient is straight
    through.

    Ties go to the even value, as hardware rounds; the research code rounds them up.

    Args:
        size: Elements that share a correction, a multiple of 16: those of a block of the transform.

    Example:
        >>> import torch, qsim
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> x = torch.randn(64)
        >>> point = qsim.points.Rotated(qsim.points.MSEden(32), qsim.transforms.Hadamard(32), redraw="call")
        >>> mean = torch.stack([point(x) for _ in range(500)]).mean(0)
        >>> bool((mean - x).norm() < 0.01 * x.norm()), bool((point(x) - x).norm() > 0.05 * x.norm())
        (True, True)
    """

    gradient: Gradient = "straight"
    format = E2M1
    is_directed = True

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.size = check_integer("MSEden", "size", size, _BLOCK, 2**20)
        if size % _BLOCK:
            raise ValueError(f"MSEden: size must be a multiple of 16, got {size}")

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round the elements, and correct and round the scales."""
        values = wide(x.detach())
        rows = values.view(1, 1) if x.dim() == 0 else values.reshape(-1, x.shape[-1])
        missing = -rows.shape[1] % self.size
        blocks = pad(rows, (0, missing)).view(rows.shape[0], -1, self.size // _BLOCK, _BLOCK)
        amax = blocks.abs().amax(-1, keepdim=True)
        whole = divided(divided(amax.amax(), _REACH), _TARGET)
        whole = torch.where(whole == 0, 1.0, whole)
        scales = quantize(divided(amax, _TARGET) / whole, E4M3)
        scales = torch.where(scales == 0, 1.0, scales)
        scaled = blocks / (scales * whole)
        elements = quantize(scaled, E2M1)
        corrected = quantize(scales * self._correction(scaled, elements), E4M3, "stochastic", **noise)
        result = (elements * (corrected * whole)).view(rows.shape[0], -1)[:, : rows.shape[1]]
        return surrogate(x, result.reshape(x.shape).to(x.dtype))

    def _correction(self, scaled: Tensor, elements: Tensor) -> Tensor:
        """The factor by which a group's elements are too small on average; summed in float64, so that the order does not decide."""
        scaled = scaled.double()
        wanted, found = (scaled.mul(other).sum((-2, -1), keepdim=True) for other in (scaled, elements.double()))
        return torch.where(found == 0, 1.0, wanted / found).to(elements.dtype)

    def extra_repr(self) -> str:
        """The size."""
        return f"{self.size}"
