"""torch.nn.MultiheadAttention with points: its projections and both of its products are rounded."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qsim.functional.tracing import refuse_tracing
from qsim.nn.calls.modules import in_the_mode
from qsim.nn.modules import FivePointModule
from qsim.recipes.five_point import FivePoint


class MultiheadAttention(FivePointModule, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with its projections and both products of attention rounded.

    It computes as torch does, and the products are rounded where torch computes them: a subclass in a converted model gives the same bits.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.MultiheadAttention(8, 2, batch_first=True, points=qsim.FivePoint(act="e4m3", weight="e4m3"))
        >>> x = torch.randn(1, 5, 8)
        >>> [y.shape for y in layer(x, x, x)]
        [torch.Size([1, 5, 8]), torch.Size([1, 5, 5])]
    """

    __call__ = nn.Module.__call__  # not paused: it rounds in the mode

    @classmethod
    def check_points(cls, points: FivePoint) -> None:
        """Raise an error for delayed scales: six products would share one history."""
        if points.is_delayed:
            raise ValueError("MultiheadAttention: delayed scales are for layers of one product: give it others, or exclude it")

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The rounded attention; arguments and results are torch's."""
        if self.points.is_identity:
            return super().forward(query, *args, **kwargs)
        refuse_tracing("MultiheadAttention", query, has_points=True)
        return _rounded(self, query, *args, **kwargs)  # type: ignore[no-any-return]


_rounded = in_the_mode(nn.MultiheadAttention)
