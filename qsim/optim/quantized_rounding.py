"""The roundings of a step of `Quantized`: of gradients before it, of weights, their copies and the optimizer's states after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.functional.quantizer import Quantizer
from qsim.optim import quantized_checks as checks
from qsim.optim.noise import StepNoise
from qsim.optim.rounding import round_into
from qsim.random import shards
from qsim.random.noise import Noise


def round_gradients(parameters: Sequence[Tensor], quantizer: Quantizer | None, scale: float, noise: StepNoise, evaluation: int) -> None:
    """Multiply the gradients by a factor, and round them, in place."""
    for number, parameter in enumerate(parameters):
        if parameter.grad is None:
            continue
        if quantizer is not None and shards.is_distributed(parameter.grad):
            # Tensor parallelism may leave a partial sum; the total is rounded.
            parameter.grad = shards.placed_as(parameter.grad, parameter)
        source, wide = parameter.grad, torch.promote_types(parameter.grad.dtype, torch.float32)
        if scale != 1.0:
            # A 16-bit dtype would round the product before the quantizer does.
            source = source.mul_(scale) if quantizer is None else source.to(wide).mul_(scale)
        if quantizer is not None:
            round_into(parameter.grad, source, quantizer, noise.seed, noise.stream("gradient", number, evaluation))


@torch.no_grad()
def round_weights(
    parameters: Sequence[Tensor],
    sources: Mapping[Tensor, Tensor],
    quantizer: Quantizer | None,
    noise: StepNoise,
    evaluation: int = 0,
    role: str = "weight",
) -> None:
    """Round the parameters that have a source from it: the parameter itself, or the copy that it follows from."""
    for number, parameter in enumerate(parameters):
        source = sources.get(parameter)
        if source is None:
            continue
        if quantizer is not None:
            round_into(parameter, source, quantizer, noise.seed, noise.stream(role, number, evaluation))
        elif source is not parameter:
            parameter.copy_(source)


def round_copies(parameters: Sequence[Tensor], copies: Mapping[Tensor, Tensor], quantizer: Quantizer, noise: StepNoise) -> None:
    """Round the copies of the weights, in place."""
    for number, parameter in enumerate(parameters):
        copy = copies[parameter]
        round_into(copy, copy, quantizer, noise.seed, noise.stream("accumulator", number))


class RoundedState(NamedTuple):
    """A state that is rounded.

    Attributes:
        number: The number of its parameter.
        name: Its name.
        x: The state.
        quantizer: How it is rounded.
        like: A tensor with its placements.
    """

    number: int
    name: str
    x: Tensor
    quantizer: Quantizer
    like: Tensor

    def round(self, noise: StepNoise) -> None:
        """Round it in place."""
        if self.quantizer.scale is not None:
            # Neighbours of the whole state, in the order of its elements, form blocks.
            noise_of = Noise(noise.seed, noise.stream(f"state {self.name}", self.number))
            self.x.copy_(self.quantizer(self.x.flatten(), seed=noise_of if noise.seed is not None else None).view(self.x.shape))
            return
        round_into(self.x, self.x, self.quantizer, noise.seed, noise.stream(f"state {self.name}", self.number), self.like)


def rounded_states(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], states: checks.States) -> list[RoundedState]:
    """The states of an optimizer that are rounded.

    Args:
        optimizer: The optimizer.
        parameters: Its parameters.
        states: One quantizer for all states, or those of some by name.

    Raises:
        TypeError: If a dtype cannot hold a format.
        ValueError: If it took a step and has no state of a name.
    """
    if states is None:
        return []
    named = states if isinstance(states, dict) else None
    found: list[RoundedState] = []
    known: set[str] = set()
    saved: Mapping[Tensor, Mapping[Any, Any]] = optimizer.state
    for number, parameter in enumerate(parameters):
        for name, x in checks.states_of_parameter(saved.get(parameter, {}), parameter):
            known.add(name)
            quantizer = states if named is None else named.get(name)
            if isinstance(quantizer, Quantizer):
                checks.check_state(name, number, x, parameter, quantizer)
                found.append(RoundedState(number, name, x, quantizer, checks.placed_alike(name, x, parameter)))
    if named is not None and any(parameter.grad is not None for parameter in parameters):
        checks.check_names(named, known, type(optimizer).__name__)
    return found
