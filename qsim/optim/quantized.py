"""Low precision around any torch-style optimizer: gradients are rounded before its step, weights and states after it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qsim.functional.quantizer import Point, Quantizer, is_stochastic, short
from qsim.optim import accumulators, quantized_checks as checks, quantized_rounding as rounding
from qsim.optim.modes import SwitchesModes
from qsim.optim.noise import StepNoise
from qsim.optim.rounding import round_into
from qsim.optim.seeds import DrawsSeed

STEPS, SEED = "quantized_steps", "quantized_seed"


class Quantized(DrawsSeed, SwitchesModes):
    """A low-precision wrapper around any optimizer.

    A step multiplies each gradient by `grad_scale` and rounds it (`grad`), both in place; runs the optimizer's step; and rounds the weights
    (`weight`) and the states (`state`). Nothing is rounded at construction: the first step rounds all weights of the optimizer, including
    those without a gradient.

    With `accumulator` the optimizer updates copies of the weights in a higher precision, and the parameters are these copies rounded with
    `weight`. The copies are taken from the weights at the first step; from then on the weights follow only from them. Updates too small for
    the weights' format accumulate there instead of getting lost.

    A closure is evaluated by the optimizer as usual. The gradients that it computes are rounded at each evaluation, and with `accumulator`
    so are the weights that it sees.

    Stochastic rounding takes its random bits from the seed, the step, the role (weight, gradient, accumulator, state by name), the number
    of the parameter in the optimizer, and the index in the whole parameter, regardless of sharding. All processes of a distributed run
    share one seed, so that replicas stay identical. Seed and number of steps are stored in `param_groups`, the copies of the weights in
    `state_dict`: a resumed run continues as if it had never stopped. If a state_dict has none of these, such as one of the optimizer
    itself, seed and number are kept and copies are taken again at the next step.

    Schedule-free optimizers switch the weights between two modes: `train()` and `eval()` are forwarded, where the optimizer has them. The
    weights of both modes are rounded, but the optimizer switches unrounded ones, so that `train()` restores the weights from before
    `eval()`. Between the two calls the weights must not be changed.

    Args:
        optimizer: The optimizer, which shares its parameter groups and state with this wrapper.
        weight: How weights are rounded: a `Quantizer`, anything `qsim.format` takes (with round-to-nearest), or `None` for no rounding.
            A quantizer's `overflow=None` follows the format: infinities where it has them, saturation elsewhere; see
            `qsim.rounding.Overflow`.
        grad: How gradients are rounded. They are operands of the update and saturate by default, because loss scaling has looked for
            infinities before the step.
        state: How the optimizer's floating-point states of a parameter are rounded, or those of some names; scalars such as `step` and
            tensors in lists are left alone. A quantizer with scales of blocks, `PerBlock(size)`, has a scale for each `size` neighbours of
            the flattened state: see `block_states`.
        accumulator: How the copies of the weights are rounded; `None` for no copies. They have the parameter's dtype if that holds the
            format, else the narrowest that does.
        grad_scale: Factor by which gradients are first multiplied, in their dtype.
        seed: The seed. By default it is drawn from torch's generator when the optimizer is created; in a distributed run all processes with
            the same weights use the draw of the first of them, from the first step that needs it.

    Raises:
        TypeError: If an argument has the wrong type, or a parameter or a gradient is sparse or not floating-point.
        ValueError: If a dtype cannot hold a format, or the optimizer has no state of a name.

    Example:
        >>> import torch, qsim
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -0.3]))
        >>> optimizer = qsim.optim.Quantized(torch.optim.SGD([weight], lr=0.25), weight="e4m3", grad="e5m2")
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [0.5, -0.140625]
    """

    weight: Quantizer | None
    grad: Quantizer | None
    states: checks.States
    accumulator: Quantizer | None
    grad_scale: float
    _copies: dict[Tensor, Tensor]
    _attributes = ("optimizer", "weight", "grad", "states", "accumulator", "grad_scale", "_copies", "_drawn")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        weight: Point = None,
        grad: Point = None,
        state: Point | Mapping[str, Point] = None,
        accumulator: Point = None,
        grad_scale: float = 1.0,
        seed: int | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, Quantized):
            raise TypeError(f"Quantized: optimizer must be a torch.optim.Optimizer, not quantized already, got {type(optimizer).__name__}")
        points = {"weight": weight, "grad": grad, "accumulator": accumulator}
        resolved = {name: checks.quantizer_of(name, point) for name, point in points.items()}
        resolved["grad"] = checks.saturating(resolved["grad"])
        states, grad_scale = checks.states_of(state), checks.check_scale(grad_scale)
        if seed is not None:
            seed = checks.checked_seed(seed)
        for number, parameter in enumerate(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)):
            checks.check_parameter(number, parameter, resolved["weight"])
        self._wrap(optimizer=optimizer, states=states, grad_scale=grad_scale, _copies={}, **resolved)
        # An optimizer that was wrapped before keeps its seed.
        found = self.param_groups[0].get(SEED) if seed is None else seed
        self._note(self.steps, self._draw_seed() if found is None else found)

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return int(self.param_groups[0].get(STEPS, 0))

    @property
    def seed(self) -> int:
        """The seed; in a distributed run, a drawn seed is replaced by the first process's draw at the first step that needs it."""
        return int(self.param_groups[0][SEED])

    @property
    def copies(self) -> Mapping[Tensor, Tensor]:
        """Copies of the weights in a higher precision, by parameter; none before the first step, and none without `accumulator`."""
        return self._copies

    def _note(self, steps: int, seed: int) -> None:
        for group in self.param_groups:
            group[STEPS], group[SEED] = steps, seed

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer.

        Args:
            param_group: As for torch's optimizers.
        """
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else given if isinstance(given, set) else list(given)
        for number, parameter in enumerate(params, len(self._parameters())):
            # Named parameters are pairs; the optimizer raises an error for other types.
            tensor = parameter[-1] if isinstance(parameter, tuple) else parameter
            if isinstance(tensor, Tensor):
                checks.check_parameter(number, tensor, self.weight)
        self.optimizer.add_param_group({**param_group, "params": params})
        self._note(self.steps, self.seed)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Args:
            closure: Computes the loss and its gradients again; needed by some optimizers.

        Returns:
            The result of the optimizer's step.
        """
        if self._copies and self.accumulator is None:
            raise RuntimeError("Quantized: step() in evaluation mode: call train() first")
        if closure is None:
            self._check_gradients()
        noise = self._noise()
        self._make_copies()
        if closure is None:
            self._take_gradients(noise)
        with accumulators.parameters_exchanged(self.optimizer, self._copies):
            loss = self.optimizer.step() if closure is None else self.optimizer.step(self._rounding(closure, noise))
        self._finish(noise)
        return loss

    def _rounding(self, closure: Callable[[], Any], noise: StepNoise) -> Callable[[], Any]:
        """A closure that rounds the gradients of another one."""
        evaluations = itertools.count()
        parameters = {copy: parameter for parameter, copy in self._copies.items()}

        def evaluate() -> Any:
            evaluation = next(evaluations)
            with accumulators.parameters_exchanged(self.optimizer, parameters):
                if evaluation and self._copies:
                    rounding.round_weights(self._parameters(), self._copies, self.weight, noise, evaluation)
                loss = closure()
                self._check_gradients()
                self._take_gradients(noise, evaluation)
            return loss

        return evaluate

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode)
        # No weight is rounded before the first step.
        if not self.steps or (self.weight is None and self.accumulator is None):
            switch()
            return
        self._make_copies()
        if self.accumulator is None:
            self._copies.update({p: accumulators.copy_of(p) for p in self._parameters() if p not in self._copies})
        with accumulators.parameters_exchanged(self.optimizer, self._copies):
            switch()
        # The noise of the last step: unchanged weights stay the same.
        noise = StepNoise(self.seed, self.steps - 1)
        if mode == "eval":
            rounding.round_weights(self._parameters(), self._copies, self.weight, noise, role="evaluation")
        else:
            self._write_weights_of_training(noise)

    def _write_weights_of_training(self, noise: StepNoise) -> None:
        """Restore the weights of the last step: recomputed by the optimizer, they are off by rounding errors of its dtype."""
        if self.accumulator is not None:
            for copy in self._copies.values():
                round_into(copy, copy, checks.to_nearest(self.accumulator), None, 0)
            rounding.round_weights(self._parameters(), self._copies, self.weight, noise)
        elif self.weight is not None:
            for parameter, copy in self._copies.items():
                round_into(parameter, copy, checks.to_nearest(self.weight), None, 0)
            self._copies = {}

    def _check_gradients(self) -> None:
        for number, parameter in enumerate(self._parameters()):
            if parameter.grad is not None:
                checks.check_gradient(number, parameter.grad, self.grad)

    def _noise(self) -> StepNoise:
        """The noise of the next step; at the first step that has some, all processes agree on the seed."""
        states = self.states.values() if isinstance(self.states, dict) else [self.states]
        if not any(map(is_stochastic, (self.weight, self.grad, self.accumulator, *states))):
            return StepNoise(None, self.steps)
        if any(x.is_cuda for x in self._parameters()) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("Quantized: every replay of a CUDA graph would repeat this step's noise; capture what comes before it")
        with torch.no_grad():
            self._note(self.steps, self._agreed_seed(self.seed, self._parameters()))
        return StepNoise(self.seed, self.steps)

    @torch.no_grad()
    def _make_copies(self) -> None:
        if self.accumulator is None:
            return
        for parameter in self._parameters():
            if parameter not in self._copies:
                copy = self._copies[parameter] = accumulators.copy_of(parameter, self.accumulator.format)
                # After earlier steps, an optimizer has states in the parameter's dtype.
                for name, x in checks.states_of_parameter(self.state.get(parameter, {}), parameter):
                    if x.dtype == parameter.dtype != copy.dtype:
                        self.state[parameter][name] = x.to(copy.dtype)

    @torch.no_grad()
    def _take_gradients(self, noise: StepNoise, evaluation: int = 0) -> None:
        """Round the gradients, and assign them to the copies."""
        rounding.round_gradients(self._parameters(), self.grad, self.grad_scale, noise, evaluation)
        for parameter, copy in self._copies.items():
            copy.grad = None if parameter.grad is None else parameter.grad.to(copy.dtype)

    @torch.no_grad()
    def _finish(self, noise: StepNoise) -> None:
        """Round the optimizer's weights and states after its step."""
        for copy in self._copies.values():
            copy.grad = None
        parameters = self._parameters()
        states = rounding.rounded_states(self.optimizer, parameters, self.states)
        if self.accumulator is not None:
            rounding.round_copies(parameters, self._copies, self.accumulator, noise)
        rounding.round_weights(parameters, self._copies, self.weight, noise)
        for state in states:
            state.round(noise)
        self._note(noise.step + 1, self.seed)

    def _saved(self) -> dict[str, Any]:
        name = accumulators.UNROUNDED if self.accumulator is None else accumulators.KEY
        return accumulators.with_copies(super()._saved(), self._parameters(), self._copies, name)

    def _load(self, state_dict: dict[str, Any]) -> None:
        steps, seed = self.steps, self.seed
        rest, saved = accumulators.split(state_dict, accumulators.KEY)
        rest, unrounded = accumulators.split(rest, accumulators.UNROUNDED)
        self._check_saved(bool(saved), bool(unrounded))
        copies, stand_ins, parameters = {}, {}, self._parameters()
        fmt = None if self.accumulator is None else self.accumulator.format
        if self.accumulator is not None or unrounded:
            copies = accumulators.loaded({**saved, **unrounded}, accumulators.keys_of(rest), parameters, fmt)
        if self.accumulator is not None:
            stand_ins = {x: copies[x] if x in copies else accumulators.copy_of(x, fmt) for x in parameters}
        # Optimizers cast states to the dtype of their parameter: here, of the copies.
        with accumulators.parameters_exchanged(self.optimizer, stand_ins):
            super()._load(rest)
        self._copies = copies
        self._note(self.param_groups[0].get(STEPS, steps), self.param_groups[0].get(SEED, seed))

    def _check_saved(self, accumulators_are: bool, unrounded_are: bool) -> None:
        """Raise an error for copies of the weights that this optimizer cannot use."""
        if accumulators_are and self.accumulator is None:
            raise ValueError("Quantized: the state_dict has accumulators, and accumulator= is None: they would be lost")
        if unrounded_are and (self.accumulator is not None or self.weight is None):
            raise ValueError(
                "Quantized: the state_dict was saved in evaluation mode, with weight= and without accumulator=; load it into such an "
                f"optimizer and call train() before saving, got weight={self.weight} and accumulator={self.accumulator}"
            )

    def __repr__(self) -> str:
        points = {"weight": self.weight, "grad": self.grad, "accumulator": self.accumulator}
        points |= {f"state[{k!r}]": v for k, v in self.states.items()} if isinstance(self.states, dict) else {"state": self.states}
        shown = [f"{name}={short(point)}" for name, point in points.items() if point is not None]
        shown += [f"grad_scale={self.grad_scale:g}"] if self.grad_scale != 1.0 else []
        return f"Quantized({', '.join([repr(self.optimizer), *shown])})"
