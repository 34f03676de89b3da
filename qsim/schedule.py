"""Schedules: points of a model, or options of an optimizer, that change during a run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from qsim import recipes
from qsim.formats import Format
from qsim.formats.base import check_flags, check_integer
from qsim.functional.quantizer import Quantizer
from qsim.nn import convert
from qsim.nn.calls.settings import Calls, call_points
from qsim.nn.modules import FivePointModule
from qsim.nn.record import ProductRounding
from qsim.optim.base import LowPrecisionOptimizer
from qsim.random.seeds import fresh_seed
from qsim.recipes.five_point import FivePoint
from qsim.recipes.points_of import is_recipe, points_of
from qsim.scaling import Block
from qsim.text.warning import warn


class Schedule:
    """Phases of a run, each with points of its own: `Schedule({0: "bf16", 0.1: "nvfp4", 0.85: "bf16"}, total_steps=1000)`.

    `start(model)` converts the model to the first phase. After that it works like a learning rate scheduler: call `step()` after each step
    of the optimizer, and save and load its `state_dict`.

    Each phase converts the model as `qsim.convert` does, on top of the phase before: layers that a phase does not choose keep their points,
    such as the last layer under `"nvfp4"`. Before the first phase the layers round nothing. All phases are tried when the schedule starts,
    so one that a layer cannot have raises an error before training.

    A phase is anything that `convert` takes; or a format or a `Quantizer`, which rounds at all five points; or `None` for full precision.
    `"bf16"` emulates products in BF16 whatever the dtype of the model, with sums in float32; it changes nothing in a model in bfloat16 or
    under autocast. `None` leaves products to torch, in the dtype that the model has.

    Compiled models keep the graphs of all phases: a later phase compiles once, and an earlier one is reused. The random bits of a layer's
    weight have the same stream in all phases.

    An optimizer of `qsim.optim` can have a schedule, too: its phases are dictionaries of the options `format`, `update`, `state`,
    `state_rounding`, `arithmetic` and `overflow`.

    Args:
        phases: The phases by where they begin, in order, the first at 0: all of them steps, integers; or all fractions of the run, floats
            below 1. A fraction begins at the nearest step.
        total_steps: The number of optimizer steps in the run, for fractions. `start` takes it as well.
        include: Which layers to convert; this and the others as `qsim.convert` takes them.
        exclude: Which layers to leave alone, in all phases.
        embeddings: Convert embeddings, too.
        adapters: Convert adapters, too.
        calls: Which products outside of layers are rounded.

    Raises:
        TypeError: If the phases are not a mapping, or begin at something else than numbers.
        ValueError: If phases begin out of range, out of order or not at 0, mix steps and fractions, or name an unknown recipe or format.

    Example:
        >>> import torch, qsim
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = qsim.optim.AdamW(model.parameters(), lr=1e-3, update="nearest")
        >>> points = qsim.Schedule({0: "bf16", 0.5: "fp8_hybrid", 0.75: None}, total_steps=4).start(model)
        >>> updates = qsim.Schedule({0: {"update": "nearest"}, 3: {"update": "stochastic"}}).start(optimizer)
        >>> for _ in range(4):
        ...     print(points.phase, updates.phase)
        ...     model(torch.randn(3, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     points.step()
        ...     updates.step()
        bf16 {'update': 'nearest'}
        bf16 {'update': 'nearest'}
        fp8_hybrid {'update': 'nearest'}
        None {'update': 'stochastic'}
    """

    def __init__(
        self,
        phases: Mapping[int | float, Any],
        *,
        total_steps: int | None = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        embeddings: bool = False,
        adapters: bool = False,
        calls: Calls = "parameters",
    ) -> None:
        check_flags("Schedule", embeddings=embeddings, adapters=adapters)
        self._starts = _checked_starts(phases)
        self._values = [_points(value) for value in phases.values()]
        self._names = list(phases.values())
        self._chosen: dict[str, Any] = {"include": include, "exclude": exclude}
        self._chosen |= {"embeddings": embeddings, "adapters": adapters, "calls": calls}
        self.total_steps = total_steps
        self._target: _Model | _Optimizer | None = None
        self._step, self._phase = 0, -1
        self._seed: int | None = None

    def start(self, target: nn.Module | torch.optim.Optimizer, total_steps: int | None = None) -> Schedule:
        """Bind the schedule to a model or an optimizer, and begin the phase of the current step: the first one, unless a state was loaded.

        Args:
            target: The model, or the optimizer of `qsim.optim`.
            total_steps: The number of optimizer steps in the run, if it is not known yet.

        Returns:
            The schedule.

        Raises:
            TypeError: If the target is neither.
            ValueError: If phases begin at fractions of an unknown number of steps, or the target cannot have one of the phases.
        """
        if total_steps is not None:
            self.total_steps = total_steps
        self._boundaries = self._checked_boundaries()
        if isinstance(target, nn.Module):
            self._seed = fresh_seed() if self._seed is None else self._seed
            self._target = _Model(target, self._values, self._chosen, self._seed)
        elif isinstance(target, LowPrecisionOptimizer):
            self._target = _Optimizer(target, self._values)
        else:
            raise TypeError(f"Schedule: start takes a torch.nn.Module or an optimizer of qsim.optim, got {type(target).__name__}")
        self._phase = -1
        self.seek(self._step)
        return self

    def step(self) -> None:
        """Count a step of the optimizer, and begin the next phase if it is time. Call it after the optimizer's `step`."""
        self.seek(self._step + 1)

    def seek(self, step: int) -> None:
        """Go to the phase of a step, forward or backward.

        Args:
            step: Number of optimizer steps so far.

        Raises:
            RuntimeError: If the schedule has not been started.
        """
        check_integer("Schedule", "step", step, 0, 2**62)
        if self._target is None:
            raise RuntimeError("Schedule: start it first, with schedule.start(model)")
        self._step, phase = step, bisect_right(self._boundaries, step) - 1
        if phase != self._phase:
            self._target.enter(phase)
            self._phase = phase

    @property
    def steps(self) -> int:
        """The number of optimizer steps so far."""
        return self._step

    @property
    def phase(self) -> Any:
        """The current phase, as it was given; `None` before the start."""
        return None if self._target is None else self._names[self._phase]

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and the seed of the weights' random bits."""
        return {"step": self._step, "seed": self._seed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state, before or after the start. Load the model's own state after that: some points have buffers.

        Raises:
            ValueError: If it is not the state of a schedule.
        """
        if set(state_dict) != {"step", "seed"}:
            raise ValueError(f"Schedule: a state has step and seed, got {', '.join(map(str, state_dict)) or 'nothing'}")
        check_integer("Schedule", "step", state_dict["step"], 0, 2**62)
        self._step, self._seed = state_dict["step"], state_dict["seed"]
        if self._target is not None:
            self.start(self._target.target)

    def _checked_boundaries(self) -> list[int]:
        """The steps at which the phases begin; of two that begin at the same step in a short run, the later one counts."""
        if all(isinstance(start, int) for start in self._starts):
            return [int(start) for start in self._starts]
        if self.total_steps is None:
            raise ValueError(
                f"Schedule: phases begin at fractions of the run, {', '.join(map(str, self._starts))}, and its length is not known: "
                "give total_steps"
            )
        total = check_integer("Schedule", "total_steps", self.total_steps, 1, 2**62)
        return [round(start * total) for start in self._starts]

    def __repr__(self) -> str:
        phases = ", ".join(f"{start}: {name!r}" for start, name in zip(self._starts, self._names, strict=True))
        return f"Schedule({{{phases}}}, total_steps={self.total_steps})"


class Schedules:
    """The schedules of a model and of its optimizer, for a trainer that counts steps itself.

    Args:
        model: The schedule of the model.
        optimizer: The schedule of the optimizer, if it has one.
    """

    def __init__(self, model: Schedule, optimizer: Schedule | None) -> None:
        for name, given in (("schedule", model), ("optimizer", optimizer or model)):
            if not isinstance(given, Schedule):
                raise TypeError(f"ScheduleCallback: {name} must be a qsim.Schedule, got {given!r}")
        self._model, self._optimizer = model, optimizer

    def start(self, model: nn.Module, optimizer: Any, total_steps: int, step: int = 0, saved: Mapping[str, Any] | None = None) -> None:
        """Start both at a step, with the state that a checkpoint may have."""
        seed = saved["seed"] if saved else None
        for schedule, target in ((self._model, model), (self._optimizer, optimizer)):
            if schedule is not None:
                schedule.load_state_dict({"step": step, "seed": seed})
                schedule.start(target, total_steps)

    def seek(self, step: int) -> None:
        """Go to a step."""
        for schedule in (self._model, self._optimizer):
            if schedule is not None:
                schedule.seek(step)

    def state_dict(self) -> dict[str, Any]:
        """The state of the model's schedule; the optimizer's follows from the step."""
        return self._model.state_dict()


class _Model:
    """A model with the points of its layers in each phase."""

    def __init__(self, model: nn.Module, phases: list[Any], chosen: dict[str, Any], seed: int) -> None:
        self.target, self._chosen, self._seed = model, chosen, seed
        self._loaded = dict(model.named_buffers())
        self._convert(_NOTHING)
        # Equal points are one object, by which compiled code recognizes them.
        self._same: dict[FivePoint, FivePoint] = {}
        self._parameters: list[list[str]] = []
        self._phases = [self._tried(points) for points in phases]
        self._warn_of_parameters()

    def _warn_of_parameters(self) -> None:
        """Warn of parameters in the points of a later phase, which an optimizer of the first phase's parameters does not have."""
        first, *later = self._parameters
        added = [name for names in later for name in names if name not in first]
        if added:
            warn(
                f"Schedule: a later phase adds parameters, such as {added[0]}, which an optimizer made before does not train: "
                "give them to optimizer.add_param_group when the phase begins"
            )

    def _tried(self, phase: Any) -> dict[str, FivePoint]:
        """The points of each layer, or of the products that it computes itself, after a conversion."""
        self._convert(phase)
        self._parameters.append([name for name, _ in self.target.named_parameters()])
        own = {name: call_points(module) or module for name, module in self.target.named_modules()}
        given = {name: each.points for name, each in own.items() if isinstance(each, (ProductRounding, FivePointModule))}
        return {name: self._same.setdefault(points, points) for name, points in given.items()}

    def enter(self, phase: int) -> None:
        """Give the layers their points of a phase."""
        points = self._phases[phase]
        self._convert(lambda name, module: points.get(name, _NOTHING))
        # A model that was loaded in this phase keeps the histories of its delayed scales.
        loaded, self._loaded = self._loaded, {}
        lost = {name: loaded[name] for name, buffer in self.target.named_buffers() if loaded.get(name, buffer) is not buffer}
        if lost:
            self.target.load_state_dict(lost, strict=False)

    def _convert(self, points: Any) -> None:
        """Convert the model with the schedule's own seed, so that a resumed run rounds as one that was not interrupted."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed)
            convert(self.target, points, **self._chosen)


class _Optimizer:
    """An optimizer with its options in each phase."""

    def __init__(self, optimizer: LowPrecisionOptimizer, phases: list[Any]) -> None:
        self.target, self._phases = optimizer, phases
        for options in phases:
            if not isinstance(options, Mapping):
                raise TypeError(f"Schedule: a phase of an optimizer is a dictionary of its options, got {options!r}")
            optimizer.checked_options(**options)

    def enter(self, phase: int) -> None:
        """Set the options of a phase."""
        self.target.set_options(**self._phases[phase])


#: The points of a layer in full precision.
_NOTHING = FivePoint()


def _checked_starts(phases: Mapping[int | float, Any]) -> list[int | float]:
    """Where phases begin."""
    if not isinstance(phases, Mapping):
        raise TypeError(f"Schedule: phases must be a mapping of where each begins, got {phases!r}")
    starts = list(phases)
    for start in starts:
        if isinstance(start, bool) or not isinstance(start, (int, float)):
            raise TypeError(f"Schedule: a phase begins at a step or at a fraction of the run, got {start!r}")
        if not (start >= 0 if isinstance(start, int) else 0 <= start < 1):
            raise ValueError(f"Schedule: a phase begins at a step from 0 on, or at a fraction in [0, 1), got {start!r}")
    if not starts or starts[0] != 0:
        raise ValueError(f"Schedule: the first phase must begin at 0 (None is full precision), got {starts or 'no phases'}")
    if starts != sorted(starts):
        raise ValueError(f"Schedule: phases must be in order, got {starts}")
    if len({type(start) for start in starts if start}) > 1:
        raise ValueError(f"Schedule: phases begin at steps or at fractions of the run, not at both: got {starts}")
    return starts


def _points(value: Any) -> Any:
    """A phase as `convert` takes it."""
    if value is None:
        return _NOTHING
    if is_recipe(value):
        try:
            return recipes.resolve(value)
        except ValueError as error:
            raise ValueError(f"Schedule: {value!r} is neither a recipe ({', '.join(recipes.NAMED)}) nor a format: {error}") from error
    return points_of(value) if isinstance(value, (str, torch.dtype, Format, Block, Quantizer)) else value
