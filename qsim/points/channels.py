"""Channels apart from the others, in a wider format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qsim.formats.base import check_integer
from qsim.functional.quantizer import Point, Quantizer, is_stochastic
from qsim.points.base import Gradient, PointModule, callable_of, surrogate, wide

if TYPE_CHECKING:
    from typing_extensions import Self


class Channels(PointModule):
    """Some channels rounded in another way than the rest, as TetraJet-v2 does with those that have outliers: arXiv 2510.27527.

    The chosen channels and the rest are two tensors, each with blocks of its own. `qsim.control.OutControl` chooses channels during
    training. The gradient is straight through, or the points' own if one of them has its own. CUDA graphs and compiled code may contain the
    point once it is on the device of its tensors.

    Args:
        point: Rounds the rest: a format, a `Quantizer`, or any function or module from tensor to tensor.
        wider: Rounds the chosen channels.
        channels: The numbers of the chosen channels.
        dim: The dimension of channels: -1 for inputs and weights in the forward pass; -2 for the input in the gradient of the weight,
            which sums over tokens.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([[0.11, 40.0, 0.23, 0.31]])
        >>> qsim.quantize(x, "mxfp4"), qsim.points.Channels("mxfp4", "mxfp8", channels=[1])(x)
        (tensor([[ 0., 32.,  0.,  0.]]), tensor([[ 0.1250, 40.0000,  0.2500,  0.2500]]))
    """

    indices: Tensor

    def __init__(
        self, point: Point | Callable[..., Tensor], wider: Point | Callable[..., Tensor], channels: Sequence[int], dim: int = -1
    ) -> None:
        super().__init__()
        self.point, self.wider = callable_of("Channels", point), callable_of("Channels", wider)
        self.channels = tuple(check_integer("Channels", "channels", channel, 0, 2**31) for channel in channels)
        if len(set(self.channels)) < len(self.channels):
            raise ValueError(f"Channels: channels must differ, got {channels!r}")
        self.indices = self._indices_on("cpu")
        self.dim = check_integer("Channels", "dim", dim, -2, -1)
        both = self.point, self.wider
        self.gradient: Gradient = "own" if any(getattr(one, "gradient", "straight") == "own" for one in both) else "straight"
        self.is_directed = any(map(_is_directed, both))

    def _indices_on(self, device: torch.device | str) -> Tensor:
        return torch.tensor(self.channels, dtype=torch.int64, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the numbers with the module. They are not a buffer: one that comes from the meta device has undefined values."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.indices = self._indices_on(fn(self.indices).device)
        return self

    @property
    def draws_signs(self) -> bool:
        """Whether the other operand of a product must have the same signs."""
        return bool(getattr(self.point, "draws_signs", False))

    @property
    def is_stochastic(self) -> bool:
        """Whether one of the points draws random bits from a seed."""
        return any(map(is_stochastic, (self.point, self.wider)))

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round the chosen channels and the rest."""
        values = wide(x.detach() if self.gradient == "straight" else x)
        if x.dim() < -self.dim or max(self.channels, default=-1) >= x.shape[self.dim]:
            raise ValueError(f"Channels: a tensor of shape {tuple(x.shape)} has no channel {max(self.channels)} in dimension {self.dim}")
        place = self._places(x.shape[self.dim], x.device)
        count = x.shape[self.dim] - len(self.channels)
        order = torch.empty_like(place).scatter_(0, place, torch.arange(len(place), device=x.device))
        rest, chosen = order[:count], order[count:]
        for_wider = {name: given for name, given in noise.items() if name != "signs"}
        parts = self.point(values.index_select(self.dim, rest), **noise), self.wider(values.index_select(self.dim, chosen), **for_wider)
        result = torch.cat(parts, self.dim).index_select(self.dim, place).to(x.dtype)
        return surrogate(x, result) if self.gradient == "straight" else result

    def _places(self, width: int, device: torch.device) -> Tensor:
        """Where each channel is once the chosen ones are moved behind the rest, both in ascending order."""
        is_chosen = torch.zeros(width, dtype=torch.bool, device=device).index_fill_(0, self.indices.to(device), True)
        before = is_chosen.cumsum(0)
        return torch.where(is_chosen, width - len(self.channels) + before - 1, torch.arange(width, device=device) - before)

    def extra_repr(self) -> str:
        """The quantizers, if the points are some, and the channels."""
        points = "".join(f"{one!r}, " for one in (self.point, self.wider) if not isinstance(one, torch.nn.Module))
        return f"{points}{len(self.channels)} channels" + ("" if self.dim == -1 else f", dim={self.dim}")


def _is_directed(point: Callable[..., Tensor]) -> bool:
    """Whether a point rounds along one dimension."""
    if isinstance(point, Quantizer):
        return point.transform is not None or (point.scale is not None and point.scale.is_directed)
    return bool(getattr(point, "is_directed", False))
