"""Blocks whose scales are chosen by their error: four over six."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from qsim.formats import E2M1, E4M3
from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.functional.scaled import numbers_of
from qsim.points.base import Gradient, PointModule, surrogate
from qsim.points.groups import check_granularity
from qsim.random.noise import draw
from qsim.rounding import Rounding
from qsim.scaling import PerBlock, Scaling
from qsim_kernels.numbers.scales import Restore, ScaleRule, Scales, spell_scales
from qsim_kernels.ops.direct import operators

#: How the error of a block is measured: by the sum of magnitudes, or of squares.
Error = Literal["mae", "mse"]
_SCALES = spell_scales(Scales(int(ScaleRule.FIT), 0, E2M1.max, 1, E4M3.smallest, E4M3.grid))


class FourOverSix(PointModule):
    """NVFP4 with the better of two scales per block: Cook et al., arXiv 2512.02010.

    E2M1 has no value between 4 and 6, so that numbers a little below a block's largest have large errors. Each block is rounded once with
    its largest magnitude scaled to 6, and once to 4, under which more values are evenly spaced. The one with the smaller error is kept; of
    equal ones, the first. Scales are E4M3 numbers under one of the tensor, `amax / (reach * 6)`: `reach` is what the largest block's scale
    becomes, 256 so that it may be 1.5 times as large. The gradient is straight through.

    Args:
        granularity: The blocks: `PerBlock(16)`, the default; `PerTile(16, 16)` for weights whose transpose is an operand, too; or another.
        candidates: The magnitudes that a block's largest one is scaled to, in the order of preference.
        error: `"mae"`, the sum of the errors' magnitudes, which Transformer Engine compares; or `"mse"`, the sum of their squares.
        reach: The largest block's scale; Transformer Engine also has 448.
        rounding: How elements are rounded. Stochastically, as gradients are in the authors' code, each candidate is rounded with bits of
            its own, and the errors that are compared are those of what was drawn.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([10.0, 20.0, 30.0, 40.0] * 4)
        >>> qsim.points.FourOverSix()(x)[:4], qsim.quantize(x, "nvfp4")[:4]
        (tensor([10., 20., 30., 40.]), tensor([10.0000, 20.0000, 26.6667, 40.0000]))
    """

    gradient: Gradient = "straight"

    def __init__(
        self,
        granularity: Scaling | str | None = None,
        *,
        candidates: Sequence[float] = (6.0, 4.0),
        error: Error = "mae",
        reach: float = 256.0,
        rounding: str | Rounding = "nearest",
    ) -> None:
        super().__init__()
        self.quantizer = Quantizer(E2M1, rounding)
        self.granularity = PerBlock(16) if granularity is None else check_granularity("FourOverSix", granularity)
        self.candidates = tuple(map(float, candidates))
        if not self.candidates or not all(0 < candidate <= E2M1.max for candidate in self.candidates):
            raise ValueError(f"FourOverSix: candidates must be numbers above 0 and up to 6, got {candidates!r}")
        if error not in get_args(Error):
            raise ValueError(f"FourOverSix: error must be 'mae' or 'mse', got {error!r}")
        if not 0 < reach <= E4M3.max:
            raise ValueError(f"FourOverSix: reach must be above 0 and up to 448, E4M3's largest value, got {reach!r}")
        self.error, self.reach = error, float(reach)
        self.is_directed = isinstance(self.granularity, PerBlock) and self.granularity.dim == -1

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round every block with each candidate, and keep the best."""
        return self.rounded_in(None, None, x, **noise)

    def rounded_in(self, transform: Hadamard | None, flips: Tensor | None, x: Tensor, **noise: Any) -> Tensor:
        """Round in the basis of a transform, if there is one, whose signs `flips` changes; and return to the tensor's own."""
        spelt, shape = self.quantizer.spelt, x.shape or (1,)
        seed, stream, offset = draw(spelt.is_stochastic, noise.get("seed"), noise.get("generator"), x.device)
        tiles, turn = self.granularity.tiles(shape), () if transform is None else transform.turn(shape)
        choice = [float(self.error == "mse"), self.reach, *self.candidates]
        rounding = (seed, spelt.grid, spelt.rule, stream, offset, x.dtype, int(Restore.ALL))
        values = operators(x).quantize_best(x.detach(), flips, numbers_of(tiles), turn, *_SCALES, choice, *rounding)
        return surrogate(x, values)

    def extra_repr(self) -> str:
        """The blocks and the choices."""
        choices = f"candidates={self.candidates}, error={self.error}, reach={self.reach:g}"
        return f"{self.granularity}, {choices}, rounding={self.quantizer.rounding}"
