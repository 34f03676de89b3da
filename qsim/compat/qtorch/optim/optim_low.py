"""QPyTorch's low-precision optimizer: the user's functions round weights, gradients, momentum and accumulators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from qsim.optim import accumulators
from qsim.optim.seeds import DrawsSeed
from qsim.optim.wrapper import Wrapper
from qsim.random import streams

__all__ = ["OptimLP"]

Rounds = Callable[[Tensor], Tensor]

_STEPS, _SEED = "low_precision_steps", "low_precision_seed"


class OptimLP(DrawsSeed, Wrapper):
    """SGD or Adam in low precision; `qsim.optim.Quantized` does the same for any optimizer, with formats instead of functions.

    A step multiplies gradients by `grad_scaling` and rounds them; runs the optimizer's step, on copies of the weights if there is an
    `acc_quant`; and rounds the copies, the weights (from the copies, if there are any) and the momentum. Nothing is rounded earlier.

    The functions derive their random bits from the number of the step and a seed that all processes of a distributed run share, so that
    replicas stay identical. It depends on `torch.manual_seed` and the weights. Other users of torch's generator are not affected.

    Args:
        optim: The optimizer, torch's `SGD` or `Adam`, which shares its parameter groups and state with this one.
        weight_quant: A function that rounds a weight, such as `quantizer` creates; `None` for no rounding.
        grad_scaling: The factor by which gradients are multiplied before they are rounded, if there is a `grad_quant`.
        grad_quant: A function that rounds a gradient.
        momentum_quant: A function that rounds SGD's momentum, or Adam's two moments.
        acc_quant: A function that rounds a copy of a weight, which the optimizer updates in its place. Copies are taken at the first step.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `grad_scaling` is not positive.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch import FloatingPoint
        >>> from qsim.compat.qtorch.optim import OptimLP
        >>> from qsim.compat.qtorch.quant import quantizer
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -0.3]))
        >>> to_e4m3 = quantizer(FloatingPoint(4, 3), forward_rounding="nearest")
        >>> optimizer = OptimLP(torch.optim.SGD([weight], lr=0.25), weight_quant=to_e4m3)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [0.5, -0.15625]
    """

    weight_quant: Rounds | None
    grad_quant: Rounds | None
    momentum_quant: Rounds | None
    acc_quant: Rounds | None
    grad_scaling: float
    weight_acc: dict[Tensor, Tensor]
    _attributes = ("optimizer", "weight_quant", "grad_quant", "momentum_quant", "acc_quant", "grad_scaling", "weight_acc", "_drawn")

    def __init__(
        self,
        optim: Optimizer,
        weight_quant: Rounds | None = None,
        grad_scaling: float = 1.0,
        grad_quant: Rounds | None = None,
        momentum_quant: Rounds | None = None,
        acc_quant: Rounds | None = None,
    ) -> None:
        if not isinstance(optim, (SGD, Adam)):
            raise TypeError(f"OptimLP: optim must be torch.optim.SGD or Adam, got {type(optim).__name__}; qsim.optim.Quantized takes any")
        roles = {"weight_quant": weight_quant, "grad_quant": grad_quant, "momentum_quant": momentum_quant, "acc_quant": acc_quant}
        for name, role in roles.items():
            if role is not None and not callable(role):
                raise TypeError(f"OptimLP: {name} must be a function of a tensor, such as quantizer(…) creates, or None, got {role!r}")
        if isinstance(grad_scaling, bool) or not isinstance(grad_scaling, (int, float)):
            raise TypeError(f"OptimLP: grad_scaling must be a number, got {grad_scaling!r}")
        if not 0 < grad_scaling < math.inf:
            raise ValueError(f"OptimLP: grad_scaling must be positive and finite, got {grad_scaling}")
        self._wrap(optimizer=optim, grad_scaling=float(grad_scaling), weight_acc={}, **roles)
        if _SEED not in self.param_groups[0]:
            self.param_groups[0][_SEED] = self._draw_seed()

    @property
    def optim(self) -> Optimizer:
        """The wrapped optimizer, under QPyTorch's name."""
        return self.optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Args:
            closure: Recomputes the loss and its gradients.

        Returns:
            The closure's result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), self._noise():
            self._round_gradients()
            if self.acc_quant is not None:
                for parameter in self._parameters():
                    parameter.copy_(self.weight_acc.setdefault(parameter, parameter.detach().clone()))
            self.optimizer.step()
            self._round_weights()
            self._round_momentum()
        return loss

    @contextmanager
    def _noise(self) -> Iterator[None]:
        """Seed torch's CPU generator identically in all processes for this step, and restore its state afterwards."""
        group = self.param_groups[0]
        group[_SEED] = self._agreed_seed(group[_SEED], self._parameters())
        number = group[_STEPS] = group.get(_STEPS, 0) + 1
        with torch.random.fork_rng(devices=[]), streams.shared_streams():
            torch.default_generator.manual_seed(streams.stream("OptimLP", group[_SEED], number))
            yield

    def _round_gradients(self) -> None:
        if self.grad_quant is None:
            return
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(self.grad_quant(parameter.grad * self.grad_scaling))

    def _round_weights(self) -> None:
        for parameter in self._parameters():
            if self.acc_quant is not None:
                accumulator = self.weight_acc[parameter]
                parameter.copy_(accumulator.copy_(self.acc_quant(parameter)))
            if self.weight_quant is not None:
                parameter.copy_(self.weight_quant(parameter))

    def _round_momentum(self) -> None:
        if self.momentum_quant is None:
            return
        names = ("momentum_buffer",) if isinstance(self.optimizer, SGD) else ("exp_avg", "exp_avg_sq")
        for parameter in self._parameters():
            for name in names:
                moment = self.state.get(parameter, {}).get(name)
                if parameter.grad is not None and moment is not None:
                    moment.copy_(self.momentum_quant(moment))

    def _saved(self) -> dict[str, Any]:
        return accumulators.with_copies(super()._saved(), self._parameters(), self.weight_acc)

    def _load(self, state_dict: dict[str, Any]) -> None:
        rest, saved = accumulators.split(state_dict)
        if saved and self.acc_quant is None:
            raise ValueError("OptimLP: the state_dict has accumulators, and acc_quant is None: they would be lost")
        found = {}
        for number, (key, parameter) in enumerate(zip(accumulators.keys_of(rest), self._parameters(), strict=False)):
            if key in saved:
                if saved[key].shape != parameter.shape:
                    there, due = tuple(saved[key].shape), tuple(parameter.shape)
                    raise ValueError(f"OptimLP: the accumulator of parameter {number} must have shape {due}, the state_dict has {there}")
                found[parameter] = saved[key].to(parameter, copy=True)
        seed = self.param_groups[0][_SEED]
        super()._load(rest)
        self.param_groups[0].setdefault(_SEED, seed)
        self.weight_acc = found

    def __repr__(self) -> str:
        return f"OptimLP({self.optimizer!r})"
