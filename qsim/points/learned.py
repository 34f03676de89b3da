"""Points with learned ranges: LSQ's step size and PACT's clipping level."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from qsim.formats.base import check_integer, shortest
from qsim.functional.quantizer import Point, Quantizer
from qsim.points.base import PointModule, check_number, divided, limited, limits_of, quantizer_of, surrogate, wide

#: The smallest step or clipping level in use, so that values can be divided by one that training has made zero or negative.
_SMALLEST = 2.0**-100


class LSQ(PointModule):
    """Learned step size quantization: Esser et al., arXiv 1902.08153.

    A value becomes `Q(v / s) * s`, where `Q` rounds to the format and saturates at its limits `-Q_N` and `Q_P`. The gradients are those of
    the paper's equations 3 and 5, with `N` values that share a step, those of all samples included, as in its usual implementations:

    - of a value: 1 inside of `(-Q_N, Q_P)`, and 0 outside;
    - of the step, times `1 / sqrt(N * Q_P)`: `Q(v/s) - v/s` inside, and `-Q_N` or `Q_P` outside.

    The step starts at `2 * mean(|v|) / sqrt(Q_P)` of the first tensor that is not empty (at 1 if all of it is zero), unless you give one.
    It is the sum of a buffer, `initial`, and a parameter, `change`, which starts at zero. So the parameter exists from the beginning: it is
    in optimizers, `state_dict` and FSDP's shards before any tensor has been seen. Weight decay pulls the step toward the initial one, and
    in bfloat16 small updates are not lost. Each process initializes from its own tensor: DDP broadcasts buffers at the next step;
    elsewhere the activations of ranks start from slightly different steps, unless you give `step` or call the point once before you shard.
    A module that was created on the meta device needs `reset_parameters()` after `to_empty()`, or a `state_dict`.

    Args:
        format: A format or a `Quantizer` without scales, which may round in any way.
        step: The initial step; from the first tensor by default.
        channels: Number of steps; 1 is one for the whole tensor.
        dim: The dimension of the channels.

    Example:
        >>> import torch, qsim
        >>> lsq = qsim.points.LSQ("int4", step=0.25)
        >>> x = torch.tensor([0.3, -1.1, 5.0], requires_grad=True)
        >>> lsq(x)
        tensor([ 0.2500, -1.0000,  1.7500], grad_fn=<MulBackward0>)
        >>> lsq(x).sum().backward()
        >>> x.grad, lsq.change.grad * (3 * 7) ** 0.5
        (tensor([1., 1., 0.]), tensor([7.2000]))
    """

    initial: Tensor

    def __init__(self, format: Point, step: float | None = None, *, channels: int = 1, dim: int = 0) -> None:
        super().__init__()
        self.quantizer = quantizer_of("LSQ", format, scales=False)
        _check_largest("LSQ", self.quantizer)
        self.start = 0.0 if step is None else check_number("LSQ", "step", step, 0.0, math.inf)
        self.channels = check_integer("LSQ", "channels", channels, 1, 2**31)
        self.dim = check_integer("LSQ", "dim", dim, -64, 63)
        self.register_buffer("initial", torch.empty(channels))
        self.change = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Return to the initial step, or forget it, so that the next tensor sets it again."""
        nn.init.constant_(self.initial, self.start)
        nn.init.zeros_(self.change)
        self._is_initialized = self.start > 0

    @property
    def step(self) -> Tensor:
        """Steps in use, at least in float32; zero before the first tensor."""
        return wide(self.initial) + wide(self.change)

    @torch.no_grad()
    def initialize(self, x: Tensor) -> None:
        """Set the initial steps by a tensor with at least one element, unless they are set."""
        x = wide(x).contiguous()  # sums depend on the order of elements in memory
        # Elementwise instead of a branch on a value: nothing waits for a GPU, and it compiles to one graph.
        others = [i for i in range(x.dim()) if self.channels > 1 and i != self.dim % x.dim()]
        mean = x.abs().mean(others) if self.channels > 1 else x.abs().mean().view(1)
        first = 2 * mean / math.sqrt(self.quantizer.format.max)
        first = torch.where(first == 0, 1.0, first).to(self.initial.dtype)
        self.initial.copy_(torch.where(self.initial > 0, self.initial, first))
        self._is_initialized = True

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round to multiples of the step."""
        values, (low, high) = wide(x), limits_of(self.quantizer)
        shape = self._shape(x)
        if not self._is_initialized:
            self.initialize(x)
        slope = 1 / math.sqrt(x.numel() // self.channels * high)
        step = self.step
        step = surrogate(step, step.detach().clamp(min=_SMALLEST), slope).view(shape)
        ratio = values.detach() / step.detach()
        inside = (ratio > low) & (ratio < high)
        # Numbers outside are divided apart, because zero times the derivative of a ratio that overflows is NaN.
        ratio = torch.where(inside, torch.where(inside, values, 0.0) / step, ratio.clamp(low, high))
        return (self.quantizer(ratio, **noise) * step).to(x.dtype)

    def _shape(self, x: Tensor) -> list[int]:
        """The shape in which steps broadcast to a tensor."""
        if self.channels == 1:
            return [1] * x.dim()
        if not -x.dim() <= self.dim < x.dim() or x.shape[self.dim] != self.channels:
            raise ValueError(f"LSQ: {self.channels} channels along dimension {self.dim} do not fit a tensor of shape {tuple(x.shape)}")
        return [self.channels if i == self.dim % x.dim() else 1 for i in range(x.dim())]

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._is_initialized = False  # the next tensor sets the initial steps that the state has not set

    def extra_repr(self) -> str:
        """The format and the channels."""
        channels = f", channels={self.channels}, dim={self.dim}" if self.channels > 1 else ""
        return f"{self.quantizer.format!r}, rounding={self.quantizer.rounding}{channels}"


class PACT(PointModule):
    """Parameterized clipping activation: Choi et al., arXiv 1805.06085.

    Values are clipped to `[0, alpha]`, and to `[-alpha, alpha]` in a signed format, and rounded to the format's values times `alpha / max`.
    The gradients are those of the paper's equation 3, where rounding is straight through:

    - of a value: 1 inside of the clipping range, and 0 outside;
    - of `alpha`: 1 for values of at least `alpha`, 0 below, and −1 for values of at most `-alpha` in a signed format.

    The paper adds an L2 penalty of `alpha` to the loss: weight decay of the parameter does the same.

    Args:
        format: A format or a `Quantizer` without scales, which may round in any way.
        alpha: The initial clipping level. It should be large: values beyond it are what makes it learn.

    Example:
        >>> import torch, qsim
        >>> pact = qsim.points.PACT("uint4", alpha=3.0)
        >>> x = torch.tensor([-1.0, 1.05, 4.0], requires_grad=True)
        >>> pact(x).sum().backward()
        >>> pact(x).detach(), x.grad, pact.alpha.grad
        (tensor([0., 1., 3.]), tensor([0., 1., 0.]), tensor([1.]))
    """

    def __init__(self, format: Point = "uint4", alpha: float = 10.0) -> None:
        super().__init__()
        self.quantizer = quantizer_of("PACT", format, scales=False)
        _check_largest("PACT", self.quantizer)
        self.start = check_number("PACT", "alpha", alpha, 0.0, math.inf)
        self.alpha = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Return to the initial clipping level."""
        nn.init.constant_(self.alpha, self.start)

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Clip and round."""
        alpha, values = wide(self.alpha), wide(x)
        alpha = surrogate(alpha, alpha.detach().clamp(min=_SMALLEST)).view([1] * x.dim())
        clipped = torch.where(values < alpha, values, alpha)
        clipped = torch.where(clipped > -alpha, clipped, -alpha) if self.quantizer.format.is_signed else limited(clipped, 0.0, math.inf)
        scale = divided(alpha.detach(), self.quantizer.format.max)
        return surrogate(clipped, self.quantizer(clipped.detach() / scale, **noise) * scale).to(x.dtype)

    def extra_repr(self) -> str:
        """The format and the rounding."""
        return f"{self.quantizer.format!r}, rounding={self.quantizer.rounding}"


def _check_largest(owner: str, quantizer: Quantizer) -> None:
    if not quantizer.format.max > 0:
        raise ValueError(
            f"{owner}: the format needs a positive value; the largest of {quantizer.format!r} is {shortest(quantizer.format.max)}"
        )
