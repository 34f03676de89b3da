"""Adam and AdamW with rounded updates."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from qsim.formats.base import check_flags
from qsim.functional import quantize
from qsim.optim.base import FormatLike, LowPrecisionOptimizer, Params, check_number
from qsim.optim.settings import Update, UpdateSetting
from qsim.rounding import Overflow, Rounding
from qsim.text.warning import warn
from qsim_kernels.numbers import updates
from qsim_kernels.numbers.grid import Grid, Mode, Rule, read, spell


class Adam(LowPrecisionOptimizer):
    """Adam that rounds weights to a format after each update: stochastically, to the nearest value, or with Kahan summation.

    The same arguments and states as `torch.optim.Adam`, plus the arguments after `*`. Between reading and writing, arithmetic is float32,
    in an order that is part of the contract: a step gives the same bits on every device, in any number of processes and for any sharding
    (Algorithm 1 of *Stochastic Rounding for LLM Training*). On a GPU at most three launches update all parameters of a group and a dtype.

    Args:
        params: Parameters in bfloat16, float16 or float32, groups of them, or named ones. Gradients may have any float dtype.
        lr: Learning rate, a number or a one-element tensor. A CUDA graph bakes in a number, and re-reads a tensor on the device.
        betas: Decays of the two moments.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        amsgrad: Whether the denominator uses the largest second moment so far.
        foreach: For compatibility with torch; a step is always multi-tensor.
        maximize: Whether to maximize the objective.
        capturable: For compatibility with torch; a step can always be captured in a CUDA graph, after a first one outside of it.
        differentiable: For compatibility with torch; a rounded step is not differentiable.
        fused: The step is fused either way. As in torch, with `True` a `GradScaler` leaves unscaling gradients and skipping steps to the
            step, which then does not wait for the device, and gradients cannot be clipped in between. `None` is `True` for gradients in
            float16, which a scaler does not unscale, and `False` otherwise.
        decoupled_weight_decay: Whether weights decay separately from the update, as in AdamW; otherwise the decay is added to the gradient.
        format: The weights' format, by default their dtype's own.
        update: `"stochastic"`, `"kahan"`, `"nearest"`, a `qsim.Stochastic` with its number of random bits, or `Kahan("stochastic")`: both.
        state: The moments' format, by default the parameters' dtype's own. They are kept in that dtype if it holds the format. The second
            moment of small gradients is 0 in float16, and updates grow without bound: parameters in float16 need `"fp32"` or `"bf16"`.
        state_rounding: How moments are rounded: `"nearest"`, `"stochastic"` or a `qsim.Stochastic`. With round-to-nearest, a second moment
            in bfloat16 grows but does not shrink if `betas[1]` is more than about 0.998, because a step reduces it by less than half a
            unit; this raises a warning, also for other formats.
        arithmetic: `"float32"`, or `"format"`: every operation is rounded to nearest in the weights' format, the last one according to
            `update`: Algorithms 4 and 5 of *Revisiting BFloat16 Training*.
        overflow: `"format"`: weights and moments beyond the largest value become infinities where their format has them, and saturate
            elsewhere; or another mode of `qsim.rounding.Overflow`. A weight that is infinite before becomes NaN where it cannot stay
            infinite.
        seed: The seed of all random bits. By default it is drawn from torch's generator when the optimizer is created, so separate
            optimizers round with independent noise; in a distributed run all processes with the same weights use the draw of the first of
            them, from the first step that needs it. It is stored in the group.
        generator: The generator to draw the seed from instead; it must be in the same state in all processes.

    Raises:
        TypeError: If an argument, a parameter or a gradient has the wrong type.
        ValueError: If a number is out of range, or options are incompatible.

    Example:
        >>> import torch, qsim
        >>> w = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        >>> optimizer = qsim.optim.Adam([w], lr=2**-12, seed=0)
        >>> for _ in range(64):
        ...     w.grad = torch.ones_like(w)
        ...     optimizer.step()
        >>> abs(w.double().mean().item() - (1 - 64 * 2**-12)) < 1e-3  # with round-to-nearest, no weight would have moved
        True
    """

    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    #: The argument for moments in full float32, as warnings recommend it.
    _WIDER_MOMENTS: ClassVar[str] = "state='fp32'"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
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
        flags = {"amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        check_flags(type(self).__name__, **flags, capturable=capturable)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
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

    def _check_setting(self, group: dict[str, Any], setting: UpdateSetting) -> None:
        decays: set[tuple[float, str, str]] = self.__dict__.setdefault("_warned", set())
        decay = (group["betas"][1], setting.state, setting.state_rule)
        if decay not in decays:
            decays.add(decay)
            _warn_of_what_cannot_shrink(*decay, self._WIDER_MOMENTS)
        if not setting.in_format:
            return
        for name, beta in zip(("beta1", "beta2"), group["betas"], strict=True):
            if _in_format(beta, setting) >= 1:
                advice = f"; the largest value below 1 is {_below_one(setting)}"
                paper = ", and *Revisiting BFloat16 Training* takes 0.997 in bfloat16" if name == "beta2" else ""
                raise ValueError(f"arithmetic='format': {name}={beta} becomes 1 in {setting.weight!r}{advice}{paper}")
        if group["eps"] and not _in_format(group["eps"], setting):
            raise ValueError(
                f"arithmetic='format': eps={group['eps']} becomes 0 in {setting.weight!r}; its smallest value is {setting.weight.smallest}"
            )

    def _algorithm(self, group: dict[str, Any]) -> str:
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}")
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            check_number(name, beta, below=1)
        check_number("eps", group["eps"])
        check_number("weight_decay", group["weight_decay"])
        decoupled, maximize, amsgrad = group["decoupled_weight_decay"], group["maximize"], group["amsgrad"]
        return spelt(*betas, group["eps"], group["weight_decay"], decoupled, maximize, amsgrad)

    def _states(self, group: dict[str, Any], setting: UpdateSetting) -> dict[str, torch.dtype]:
        states = {"step": torch.int64, "exp_avg": setting.state_dtype, "exp_avg_sq": setting.state_dtype}
        if group["amsgrad"]:
            states["max_exp_avg_sq"] = setting.state_dtype
        if setting.kahan:
            states["compensation"] = setting.dtype
        if setting.in_format:
            states["beta_products"] = torch.float32
        return states


class AdamW(Adam):
    """`Adam` with decoupled weight decay: `torch.optim.AdamW` with rounded updates.

    It takes the arguments of `Adam`, except for `decoupled_weight_decay`; weights decay by `weight_decay`, separately from the update.

    Example:
        >>> import torch, qsim
        >>> model = torch.nn.Linear(4, 2).to(torch.bfloat16)
        >>> optimizer = qsim.optim.AdamW(model.parameters(), lr=3e-4, update="kahan")
        >>> model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['compensation', 'exp_avg', 'exp_avg_sq', 'step']
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        format: FormatLike | None = None,
        update: Update = "stochastic",
        state: FormatLike | None = None,
        state_rounding: str | Rounding = "nearest",
        arithmetic: str = "float32",
        overflow: Overflow = "format",
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            foreach=foreach, maximize=maximize, capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=True, format=format, update=update, state=state, state_rounding=state_rounding,
            arithmetic=arithmetic, overflow=overflow, seed=seed, generator=generator,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # As in torch's AdamW, even if a loaded state_dict of Adam has the opposite.
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


@lru_cache(maxsize=256)
def spelt(beta1: float, beta2: float, eps: float, decay: float, decoupled: bool, maximize: bool, amsgrad: bool) -> str:
    """`updates.AdamAlgorithm` as text."""
    numbers = (float(beta1), float(beta2), float(eps), float(decay))
    return spell(updates.AdamAlgorithm(*numbers, bool(decoupled), bool(maximize), bool(amsgrad)))


def _in_format(number: float, setting: UpdateSetting) -> float:
    return quantize(torch.tensor(number, dtype=torch.float32, device="cpu"), setting.weight).item()


def _below_one(setting: UpdateSetting) -> float:
    return quantize(torch.tensor(1 - 2.0**-24, dtype=torch.float32, device="cpu"), setting.weight, rounding="toward_zero").item()


def _warn_of_what_cannot_shrink(beta: float, state: str, rule: str, wider: str) -> None:
    """Warn about a second moment that can only grow: a step reduces it by less than half a unit, which round-to-nearest cancels."""
    values = read(Grid, state)
    # Half a unit is smallest relative to the number with the largest mantissa.
    largest = 1 - 2.0 ** -(values.mantissa + 2)
    if beta < largest or read(Rule, rule).mode == Mode.STOCHASTIC or torch.compiler.is_compiling():
        return
    warning = f"betas[1]={beta} and moments with {values.mantissa} mantissa bits: the second moment can grow but not shrink"
    warn(f"{warning}. Give state_rounding='stochastic', {wider}, or betas[1] below {largest:.4f}")
