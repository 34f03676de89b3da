"""Pure BF16 training under names that other packages use: thin wrappers of the operators."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from qsim.functional.arguments import spelling
from qsim.optim import settings
from qsim.optim.adam import AdamW, spelt
from qsim.optim.base import Params, check_number
from qsim.random import seeds
from qsim.rounding import Rounding


class StochasticAdamW(AdamW):
    """AdamW for parameters in bfloat16, rounded stochastically, with a separate dtype for the moments.

    The arguments before `*` are those of d9d's class of this name, and so are the defaults: moments in bfloat16 are rounded stochastically,
    moments in float32 are not rounded.

    Args:
        params: Parameters in bfloat16, possibly distributed. Gradients may be bfloat16 or float32.
        lr: Learning rate.
        betas: Decays of the two moments.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        generator: The generator that the seed is drawn from; by default torch's, see `Adam`.
        state_dtype: The moments' dtype, float32 or bfloat16.
        state_rounding: How moments in bfloat16 are rounded: `"stochastic"`, `"nearest"` or a `qsim.Stochastic`.

    Raises:
        ValueError: If a parameter is not bfloat16, or an option is not one of those allowed.

    Example:
        >>> import torch, qsim
        >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = qsim.optim.StochasticAdamW([w], lr=1e-3)
        >>> w.grad = torch.ones_like(w)
        >>> optimizer.step()
        >>> optimizer.state[w]["exp_avg"].dtype
        torch.float32
    """

    _WIDER_MOMENTS: ClassVar[str] = "state_dtype=torch.float32"

    def __init__(
        self,
        params: Params,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        generator: torch.Generator | None = None,
        state_dtype: torch.dtype = torch.float32,
        *,
        state_rounding: str | Rounding = "stochastic",
    ) -> None:
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype must be float32 or bfloat16, got {state_dtype}")
        super().__init__(params, lr, betas, eps, weight_decay, state=state_dtype, state_rounding=state_rounding, generator=generator)

    def _check(self, group: dict[str, Any], first: int) -> None:
        for number, p in enumerate(group["params"], start=first):
            if p.dtype != torch.bfloat16:
                raise ValueError(f"StochasticAdamW: parameter {number} must be bfloat16, got {p.dtype}; qsim.optim.AdamW takes others")
        super()._check(group, first)


@torch.no_grad()
def adamw_stochastic_bf16_(
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    generator: torch.Generator | None = None,
) -> None:
    """Take one step of AdamW on one tensor, in place.

    Arithmetic is float32. The new weights are rounded stochastically, and so are moments in bfloat16; moments in float32 are not rounded.

    Args:
        params: The weights, bfloat16 and contiguous.
        grads: Their gradient, bfloat16 or float32.
        exp_avg: First moment, bfloat16 or float32 and contiguous.
        exp_avg_sq: Second moment, like the first.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        step: Number of the step, starting at 1.
        generator: Where the seed is drawn from; torch's CPU generator by default.

    Raises:
        TypeError: If a number has another type.
        ValueError: If a dtype, shape or layout is unsupported, or a number is out of range.

    Example:
        >>> import torch, qsim
        >>> w, m, v = torch.ones(2, dtype=torch.bfloat16), torch.zeros(2), torch.zeros(2)
        >>> qsim.optim.adamw_stochastic_bf16_(w, torch.ones(2), m, v, 0.5, 0.9, 0.999, 1e-8, 0.0, step=1)
        >>> w
        tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """
    _check_tensors(params, grads, exp_avg, exp_avg_sq)
    for name, number in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        check_number(name, number)
    check_number("beta1", beta1, below=1)
    check_number("beta2", beta2, below=1)
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"step must be an integer of at least 1, got {step!r}")
    seed = int(seeds.seed_tensor(None, generator, params.device))
    state = settings.name_of_format(exp_avg.dtype)
    setting = settings.setting(None, "stochastic", state, "stochastic", "float32", "format", torch.bfloat16)
    algorithm = spelt(beta1, beta2, eps, weight_decay, decoupled=True, maximize=False, amsgrad=False)
    steps = torch.tensor(step - 1, device=params.device)
    torch.ops.qsim.update_.default(
        [params], [grads], [exp_avg], [exp_avg_sq], [], [], [steps], [], torch.tensor(lr, dtype=torch.float64, device="cpu"), None, None,
        seed, [0], [0, 0, 0], algorithm, *setting.roundings,
    )  # fmt: skip


def _check_tensors(params: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    if params.dtype != torch.bfloat16:
        raise ValueError(f"params must be bfloat16, got {params.dtype}")
    for name, x in (("grads", grads), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if x.shape != params.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, params has {tuple(params.shape)}: they must be the same")
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{name} must be bfloat16 or float32, got {x.dtype}")
        if x.device != params.device:
            raise ValueError(f"{name} is on {x.device}, params on {params.device}: they must be on the same device")
    if exp_avg.dtype != exp_avg_sq.dtype:
        raise ValueError(f"exp_avg is {exp_avg.dtype}, exp_avg_sq {exp_avg_sq.dtype}: they must be the same")
    for name, x in (("params", params), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, it is changed in place")


def copy_fp32_to_bf16_stochastic_(target: Tensor, source: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Copy float32 values into a bfloat16 tensor with stochastic rounding.

    Args:
        target: The destination, bfloat16 and contiguous.
        source: The source, float32.
        generator: Where the seed is drawn from; torch's CPU generator by default.

    Returns:
        `target`.

    Raises:
        ValueError: If a dtype, shape or layout is unsupported.

    Example:
        >>> import torch, qsim
        >>> target = torch.empty(4, dtype=torch.bfloat16)
        >>> qsim.optim.copy_fp32_to_bf16_stochastic_(target, torch.full((4,), 1.5))
        tensor([1.5000, 1.5000, 1.5000, 1.5000], dtype=torch.bfloat16)
    """
    if target.dtype != torch.bfloat16 or source.dtype != torch.float32:
        raise ValueError(f"target must be bfloat16 and source float32, got {target.dtype} and {source.dtype}")
    if target.shape != source.shape:
        raise ValueError(f"target has shape {tuple(target.shape)}, source has {tuple(source.shape)}: they must be the same")
    if target.device != source.device:
        raise ValueError(f"target is on {target.device}, source on {source.device}: they must be on the same device")
    if not target.is_contiguous():
        raise ValueError("target must be contiguous")
    spelt = spelling(torch.bfloat16, "stochastic", "nonfinite")
    seed = seeds.seed_tensor(None, generator, target.device)
    torch.ops.qsim.quantize_out.default(source.detach(), seed, spelt.grid, spelt.rule, 0, 0, target.detach())
    return target
