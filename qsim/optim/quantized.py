"""Low precision around any torch-style optimizer: gradients are rounded before its step, weights and states after it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
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

    What is rounded is the unrounded step: if weights or states are rounded, the optimizer computes the step of parameters in bfloat16 and
    float16 in float32, on copies of weights and gradients that are freed afterwards (8 bytes per element while the step runs), and keeps
    their states in float32. Stochastic rounding to bfloat16 of weights in bfloat16 therefore works, as does `state="bf16"`. A format of
    all 24 bits of float32 that is not rounded to nearest takes copies and states in float64.

    With `accumulator` the optimizer updates copies of the weights in a higher precision, and the parameters are these copies rounded with
    `weight`. The copies are taken from the weights at the first step; from then on the weights follow only from them. Updates too small for
    the weights' format accumulate there instead of getting lost.

    A closure is evaluated by the optimizer as usual. The gradients that it computes are rounded at each evaluation, and so are the weights
    that it sees if the optimizer updates copies of them.

    In a group of plain and distributed parameters, or of several meshes, which torch's functions of lists do not take together, `foreach`
    and `fused` are off during a step.

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
        accumulator: How the copies of the weights are rounded; `None` for no lasting copies. They have the dtype in which the step is
            computed, at least float32, and hold the format.
        grad_scale: Factor by which gradients are first multiplied. The product is rounded to `grad`, or to their dtype.
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
        updated = self._updated(with_closure=closure is not None)
        if closure is None:
            self._take_gradients(updated, noise)
        with accumulators.mixed_groups_one_by_one(self.optimizer), accumulators.parameters_exchanged(self.optimizer, updated):
            loss = self.optimizer.step() if closure is None else self.optimizer.step(self._rounding(closure, updated, noise))
        self._finish(updated, noise)
        return loss

    def _rounding(self, closure: Callable[[], Any], updated: Mapping[Tensor, Tensor], noise: StepNoise) -> Callable[[], Any]:
        """A closure that rounds the gradients of another one, and the weights that it sees."""
        evaluations = itertools.count()
        parameters = {copy: parameter for parameter, copy in updated.items()}

        def evaluate() -> Any:
            evaluation = next(evaluations)
            with accumulators.parameters_exchanged(self.optimizer, parameters):
                if evaluation:
                    rounding.round_weights(self._parameters(), updated, self.weight, noise, evaluation)
                elif not self._copies:
                    # An optimizer may have moved the weights already.
                    rounding.round_weights(self._parameters(), updated, self.weight, noise, role="first evaluation")
                loss = closure()
                self._check_gradients()
                self._take_gradients(updated, noise, evaluation)
            return loss

        return evaluate

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode)
        # No weight is rounded before the first step.
        if not self.steps or (self.weight is None and self.accumulator is None):
            working = self._working_copies(self._parameters())
            with accumulators.parameters_exchanged(self.optimizer, working):
                switch()
            rounding.round_weights(self._parameters(), working, None, StepNoise(None, self.steps))
            return
        self._make_copies()
        if self.accumulator is None:
            new = [p for p in self._parameters() if p not in self._copies]
            self._copies.update({p: accumulators.copy_of(p, self._dtype_of(p)) for p in new})
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
        if not any(map(is_stochastic, (self.weight, self.grad, self.accumulator, *self._quantizers_of_states()))):
            return StepNoise(None, self.steps)
        if any(x.is_cuda for x in self._parameters()) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("Quantized: every replay of a CUDA graph would repeat this step's noise; capture what comes before it")
        with torch.no_grad():
            self._note(self.steps, self._agreed_seed(self.seed, self._parameters()))
        return StepNoise(self.seed, self.steps)

    def _quantizers_of_states(self) -> list[Quantizer]:
        points = self.states.values() if isinstance(self.states, dict) else [self.states]
        return [point for point in points if point is not None]

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        """The dtype in which the optimizer computes the step of a parameter."""
        of_weights = self.weight if self.accumulator is None else self.accumulator
        quantizers = [*([] if of_weights is None else [of_weights]), *self._quantizers_of_states()]
        return accumulators.dtype_of(parameter, quantizers, None if self.accumulator is None else self.accumulator.format)

    @torch.no_grad()
    def _make_copies(self) -> None:
        if self.accumulator is None:
            return
        for parameter in self._parameters():
            if parameter not in self._copies:
                self._copies[parameter] = accumulators.copy_of(parameter, self._dtype_of(parameter))
                self._widen_states(parameter)

    @torch.no_grad()
    def _working_copies(self, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Copies of those of some parameters whose dtype would round the step, for one call of the optimizer."""
        dtypes = {p: self._dtype_of(p) for p in parameters}
        working = {p: accumulators.copy_of(p, dtype) for p, dtype in dtypes.items() if dtype != p.dtype}
        for parameter in working if not self.steps else ():
            self._widen_states(parameter)
        return working

    def _widen_states(self, parameter: Tensor) -> None:
        """Convert states of earlier steps, which are in the parameter's dtype, to that of its copy."""
        for name, x in checks.states_of_parameter(self.state.get(parameter, {}), parameter):
            if x.dtype == parameter.dtype:
                self.state[parameter][name] = x.to(self._dtype_of(parameter))

    def _updated(self, with_closure: bool) -> Mapping[Tensor, Tensor]:
        """The tensors that the optimizer updates in place of parameters."""
        if self.accumulator is not None:
            return self._copies
        return self._working_copies([p for p in self._parameters() if with_closure or p.grad is not None])

    @torch.no_grad()
    def _take_gradients(self, updated: Mapping[Tensor, Tensor], noise: StepNoise, evaluation: int = 0) -> None:
        """Round the gradients, and assign them to the tensors that the optimizer updates."""
        rounding.round_gradients(self._parameters(), self.grad, self.grad_scale, noise, evaluation)
        for parameter, copy in updated.items():
            copy.grad = None if parameter.grad is None else parameter.grad.to(copy.dtype)

    @torch.no_grad()
    def _finish(self, updated: Mapping[Tensor, Tensor], noise: StepNoise) -> None:
        """Round the optimizer's weights and states after its step."""
        for copy in updated.values():
            copy.grad = None
        parameters = self._parameters()
        states = rounding.rounded_states(self.optimizer, parameters, self.states)
        if self.accumulator is not None:
            rounding.round_copies(parameters, self._copies, self.accumulator, noise)
        rounding.round_weights(parameters, {p: updated.get(p, p) for p in parameters}, self.weight, noise)
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
        dtypes = {parameter: self._dtype_of(parameter) for parameter in self._parameters()}
        name = "unrounded weight" if self.accumulator is None else "accumulator"
        copies = accumulators.loaded({**saved, **unrounded}, accumulators.keys_of(rest), dtypes, name)
        widened = {parameter for parameter, dtype in dtypes.items() if dtype != parameter.dtype or self.accumulator is not None}
        stand_ins = {p: copies[p] if p in copies else accumulators.copy_of(p, dtypes[p]) for p in widened}
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
