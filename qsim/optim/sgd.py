"""Stochastic gradient descent with rounded updates."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from qsim.formats.base import check_flags
from qsim.optim.base import FormatLike, LowPrecisionOptimizer, Params, check_number, check_real
from qsim.optim.settings import Update, UpdateSetting
from qsim.rounding import Overflow, Rounding
from qsim_kernels.numbers import updates
from qsim_kernels.numbers.grid import spell


class SGD(LowPrecisionOptimizer):
    """Gradient descent that rounds weights to a format after each update: stochastically, to the nearest value, or with Kahan summation.

    The same arguments and states as `torch.optim.SGD`. The others are described at `Adam`, as are the errors. With `arithmetic="format"` it
    is Algorithms 1 to 3 of *Revisiting BFloat16 Training*.

    Args:
        momentum: Decay of the momentum.
        dampening: The fraction of a gradient left out of the momentum, except for the first.
        weight_decay: Weight decay, added to the gradient unless `decoupled_weight_decay`.
        nesterov: Whether to use Nesterov momentum.
        state: The momentum's format, by default the parameters' dtype's own.

    Example:
        >>> import torch, qsim
        >>> w = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = qsim.optim.SGD([w], lr=2**-10, update="kahan")
        >>> for _ in range(16):
        ...     w.grad = torch.ones_like(w)
        ...     optimizer.step()
        >>> w.detach()
        tensor([0.9844, 0.9844, 0.9844], dtype=torch.bfloat16)
    """

    STATES: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        format: FormatLike | None = None,
        update: Update = "stochastic",
        state: FormatLike | None = None,
        state_rounding: str | Rounding = "nearest",
        arithmetic: str = "float32",
        overflow: Overflow = "format",
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        flags = {"nesterov": nesterov, "maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        check_flags(type(self).__name__, **flags)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            **flags,
            "format": format,
            "update": update,
            "state": state,
            "state_rounding": state_rounding,
            "arithmetic": arithmetic,
            "overflow": overflow,
            "seed": seed,
        }
        super().__init__(params, defaults, generator, fused, differentiable)

    def _algorithm(self, group: dict[str, Any]) -> str:
        check_number("momentum", group["momentum"])
        check_number("weight_decay", group["weight_decay"])
        check_real("dampening", group["dampening"])
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(f"nesterov=True needs a momentum and no dampening, got {group['momentum']} and {group['dampening']}")
        decoupled, maximize, nesterov = group["decoupled_weight_decay"], group["maximize"], group["nesterov"]
        return _spelt(group["momentum"], group["dampening"], group["weight_decay"], decoupled, maximize, nesterov)

    def _states(self, group: dict[str, Any], setting: UpdateSetting) -> dict[str, torch.dtype]:
        states = {"step": torch.int64}
        if group["momentum"]:
            states["momentum_buffer"] = setting.state_dtype
        if setting.kahan:
            states["compensation"] = setting.dtype
        return states


@lru_cache(maxsize=256)
def _spelt(momentum: float, dampening: float, decay: float, decoupled: bool, maximize: bool, nesterov: bool) -> str:
    return spell(updates.SGDAlgorithm(float(momentum), float(dampening), float(decay), bool(decoupled), bool(maximize), bool(nesterov)))
