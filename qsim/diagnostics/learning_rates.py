"""The learning rate that updates need to change weights of a narrow format."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qsim.formats import Format, format as resolve_format
from qsim.functional.quantizer import is_stochastic
from qsim.functional.values import quantize
from qsim.optim import Quantized
from qsim.random.shards import local

#: The number of elements of a parameter, evenly spread, from which its learning rate is estimated.
_ELEMENTS = 4096


def is_unbiased(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer rounds the weights of a group stochastically."""
    return is_stochastic(optimizer.weight) if isinstance(optimizer, Quantized) else "stochastic" in str(group.get("update", "")).lower()


def needed_rate(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, weight: Tensor) -> Tensor:
    """Return the learning rate at which half of the updates change their weight with round-to-nearest; NaN if the optimizer is not known.

    That is the median, over the updates that are not zero, of half the distance to the next value, relative to the update per unit of the
    learning rate. Weight decay is not considered.

    Args:
        optimizer: The optimizer, after its step.
        group: The group of the parameter.
        parameter: The parameter.
        weight: Its local weights before the step.
    """
    direction = _direction(optimizer, group, parameter)
    if direction is None or not weight.numel():
        return torch.full((), math.nan, device=weight.device)
    stride = -(-weight.numel() // _ELEMENTS)
    moves = direction.flatten()[::stride].abs()
    magnitudes = weight.flatten()[::stride].to(moves.dtype).abs()
    upward = quantize(torch.nextafter(magnitudes, torch.full_like(magnitudes, math.inf)), _format(optimizer, group, weight), rounding="up")
    needed = (upward - magnitudes) / 2 / moves
    return torch.where(needed.isfinite() & (needed > 0), needed, math.nan).nanmedian().float()


def _format(optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: Tensor) -> Format:
    """The format of a group's weights."""
    own = optimizer.weight.format if isinstance(optimizer, Quantized) and optimizer.weight is not None else group.get("format")
    return resolve_format(weight.dtype if own is None else own)


def _direction(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> Tensor | None:
    """The update per unit of the learning rate, for Adam and gradient descent, recognized by their states."""
    assert parameter.grad is not None
    wide = torch.promote_types(parameter.dtype, torch.float32)
    states = optimizer.state.get(parameter, {})
    tensors = {name: local(x.detach()).to(wide) for name, x in states.items() if isinstance(x, Tensor) and x.shape == parameter.shape}
    tensors.pop("compensation", None)
    if {"exp_avg", "exp_avg_sq"} <= tensors.keys() and "step" in states and "betas" in group:
        steps = torch.as_tensor(states["step"]).to(parameter.device, wide, non_blocking=True)
        first, second = (1 - torch.full_like(steps, float(beta)) ** steps for beta in group["betas"])
        found: Tensor = tensors["exp_avg"] / first / ((tensors["exp_avg_sq"] / second).sqrt() + group["eps"])
        return found
    if tensors.keys() <= {"momentum_buffer"} and "exp_avg" not in states and not parameter.grad.is_sparse:
        return tensors.get("momentum_buffer", local(parameter.grad.detach()).to(wide))
    return None
