"""MS-EDEN: rounding to nearest whose bias the scales of blocks correct."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qsim.formats import E2M1, E4M3
from qsim.formats.base import check_integer
from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.functional.scaled import numbers_of
from qsim.points.base import Gradient, PointModule, surrogate
from qsim.random.noise import draw
from qsim.scaling import PerBlock
from qsim_kernels.numbers.scales import Restore, ScaleRule, Scales, spell_scales
from qsim_kernels.ops.direct import operators

_BLOCK = 16
_BLOCKS, _ELEMENTS, _CORRECTION = PerBlock(_BLOCK), Quantizer(E2M1), Quantizer(E4M3, "stochastic")
#: What the largest element of a block is scaled to, before E4M3 rounds the scale: beyond 6, where clipping costs less than it gains.
_TARGET = E2M1.max / (0.93 * 17 / 16)
#: The scale of the largest block, which leaves room for its correction.
_REACH = 255.99
_MAKING = spell_scales(Scales(int(ScaleRule.FIT), 0, _TARGET, 1, E4M3.smallest, E4M3.grid))


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
    is_stochastic = True

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.size = check_integer("MSEden", "size", size, _BLOCK, 2**20)
        if size % _BLOCK:
            raise ValueError(f"MSEden: size must be a multiple of 16, got {size}")

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round the elements, and correct and round the scales."""
        return self.rounded_in(None, None, x, **noise)

    def rounded_in(self, transform: Hadamard | None, flips: Tensor | None, x: Tensor, **noise: Any) -> Tensor:
        """Round in the basis of a transform, if there is one, whose signs `flips` changes; and return to the tensor's own."""
        shape, spelt, (making, scale_grid) = x.shape or (1,), _ELEMENTS.spelt, _MAKING
        seed, stream, offset = draw(True, noise.get("seed"), noise.get("generator"), x.device)
        given = numbers_of(_BLOCKS.tiles(shape)), () if transform is None else transform.turn(shape), making, scale_grid
        correction = self.size, _REACH, _CORRECTION.spelt.rule
        rounding = (seed, spelt.grid, spelt.rule, stream, offset, x.dtype, int(Restore.ALL))
        return surrogate(x, operators(x).quantize_eden(x.detach(), flips, *given, *correction, *rounding))

    def extra_repr(self) -> str:
        """The size."""
        return f"{self.size}"
