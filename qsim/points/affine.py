"""Integers with a scale and a zero point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim import scaling
from qsim.formats import Fixed, Int
from qsim.functional import quantize
from qsim.functional.quantizer import Point, Quantizer, check_call
from qsim.points.base import PointModule, limited, limits_of, quantizer_of, wide
from qsim.points.groups import check_granularity, grouped, ungrouped, within
from qsim.scaling import Scaling

#: Integers that float32 holds.
_INTEGERS = Int(25)
_WHOLE = scaling.PerTensor()


class Affine(PointModule):
    """Integers with zero points: `(clamp(round(x / scale) + zero_point) - zero_point) * scale`, as `torch.fake_quantize_per_tensor_affine`.

    By default scale and zero point follow from the smallest and the largest value of each group, zero included, so that zero is exact:
    `scale = (max - min) / (q_max - q_min)` and `zero_point = q_min - round(min / scale)`. They take no gradient. The gradient of a value
    is 1 where its integer needs no clamping, and 0 elsewhere, as in torch.

    Args:
        format: An integer format of up to 16 bits, or a `Quantizer` with one, which may round in any way.
        granularity: Which elements share a scale: `PerTensor()`, `PerRow()`, `PerAxis(axis)`, `PerBlock(size, dim)` or
            `PerTile(height, width)` of `qsim.scaling`.
        scale: Fixed scales instead: a number or a tensor with one for each group, of shape `granularity.counts(x.shape)`.
        zero_point: Their zero points, 0 by default.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([[-0.1, 0.2, 0.9], [3.0, 5.0, 7.5]])
        >>> qsim.points.Affine("uint4", qsim.scaling.PerRow())(x)
        tensor([[-0.1333,  0.2000,  0.8667],
                [ 3.0000,  5.0000,  7.5000]])
        >>> qsim.points.Affine("uint4", scale=0.5, zero_point=2)(x)
        tensor([[0.0000, 0.0000, 1.0000],
                [3.0000, 5.0000, 6.5000]])
    """

    def __init__(
        self,
        format: Point = "uint8",
        granularity: Scaling | str = _WHOLE,
        *,
        scale: float | Tensor | None = None,
        zero_point: int | Tensor | None = None,
    ) -> None:
        super().__init__()
        self.quantizer = quantizer_of("Affine", format, scales=False)
        check_call("Affine", self.quantizer)
        integers = self.quantizer.format
        if not isinstance(integers, Fixed) or integers.fraction or integers.bits > 16:
            raise ValueError(f"Affine: format must be an integer format of up to 16 bits, such as 'uint8', got {integers!r}")
        self.granularity = check_granularity("Affine", granularity)
        if scale is None and zero_point is not None:
            raise ValueError("Affine: zero_point is for a fixed scale: give scale=, too, or leave it out")
        self._fixed: dict[str, Tensor] = {}
        if scale is not None:
            self._fixed = {"scale": _numbers("scale", scale), "zero_point": _numbers("zero_point", 0 if zero_point is None else zero_point)}
        for name, numbers in self._fixed.items():
            self.register_buffer(name, torch.empty(numbers.shape))
        self.reset_parameters()
        self._limits = limits_of(self.quantizer)
        # Before a zero point is added, integers may be beyond the format's range.
        self._to_integer = Quantizer(_INTEGERS, self.quantizer.rounding)

    def reset_parameters(self) -> None:
        """Return to the given scales and zero points."""
        for name, numbers in self._fixed.items():
            getattr(self, name).copy_(numbers)

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round to the integers of each group."""
        groups = grouped(wide(x), self.granularity)
        scale, zero_point = self._for_groups(groups) if self._fixed else self._of_range(groups.detach())
        integers = self._to_integer(groups / scale, **noise) + zero_point
        values = (limited(integers, *self._limits) - zero_point) * scale
        return ungrouped(values, x.shape).to(x.dtype)

    def _of_range(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zero points by the range of each group."""
        low, high = self._limits
        dims = within(groups)
        least = groups.amin(dims, keepdim=True).clamp(max=0)
        scale = (groups.amax(dims, keepdim=True).clamp(min=0) - least) / (high - low)
        scale = torch.where(scale > 0, scale, 1.0)
        return scale, torch.clamp(low - quantize(least / scale, _INTEGERS), low, high)

    def _for_groups(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """The fixed scales and zero points, in the shape of the groups."""
        counts = groups.shape[::2]
        shape = [length for count in counts for length in (count, 1)]
        fixed = []
        for name in self._fixed:
            given: Tensor = getattr(self, name)
            if given.numel() not in (1, counts.numel()):
                raise ValueError(f"Affine: {name} has {given.numel()} values for {counts.numel()} groups: give one, or one for each group")
            fixed.append(given.to(groups.dtype).reshape(-1).expand(counts.numel()).reshape(shape))
        return fixed[0], fixed[1]

    def extra_repr(self) -> str:
        """The format, the groups, the rounding, and whether scales are fixed."""
        fixed = ", fixed scales" if self._fixed else ""
        return f"{self.quantizer.format!r}, {self.granularity}, rounding={self.quantizer.rounding}{fixed}"


def _numbers(name: str, given: float | Tensor) -> Tensor:
    """Given scales or zero points, float32 on the CPU."""
    tensor = torch.as_tensor(given, dtype=torch.float32, device="cpu").detach().clone()
    usable = (tensor > 0) & tensor.isfinite() if name == "scale" else tensor == tensor.round()
    if not usable.all():
        raise ValueError(f"Affine: {name} must be {'positive and finite' if name == 'scale' else 'integers'}, got {given!r}")
    return tensor
