"""The base class of low-precision optimizers: a step of all parameters of a group in one operator call."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate
from numbers import Real
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from qsim.formats import Format
from qsim.formats.base import check_flag
from qsim.optim import kahan, settings
from qsim.optim.batches import Batch, batches_of, check_gradients
from qsim.optim.saved import StateDict, adapted, restored
from qsim.optim.seeds import DrawsSeed
from qsim.optim.settings import Options, UpdateSetting
from qsim.private import disable_dynamo
from qsim.random import seeds

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
FormatLike = str | torch.dtype | Format


class LowPrecisionOptimizer(DrawsSeed, torch.optim.Optimizer):
    """Base class of optimizers with rounded updates. Create an `AdamW`, an `Adam` or an `SGD`.

    Args:
        params: Parameters, groups of them or named ones, as torch's optimizers take them.
        defaults: The options of groups that do not give their own.
        generator: The generator that the groups' seed is drawn from.
        fused: As in torch's optimizers.
        differentiable: As in torch's optimizers, and always `False`.
    """

    # The meaning of torch's option `fused`, see `_step_supports_amp_scaling`.
    _fused: bool | None = None
    # A GradScaler sets these for a step that unscales gradients itself.
    grad_scale: Tensor | None
    found_inf: Tensor | None

    #: The states that a parameter may have, in addition to those that every optimizer here has.
    STATES: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, params: Params, defaults: dict[str, Any], generator: torch.Generator | None, fused: bool | None, differentiable: bool
    ) -> None:
        check_flag(type(self).__name__, "differentiable", differentiable)
        if differentiable:
            raise ValueError("differentiable=True: a rounded step is not differentiable")
        if fused is not None and not isinstance(fused, bool):
            raise TypeError(f"fused must be True, False or None, got {fused!r}")
        if generator is not None:
            if defaults["seed"] is not None:
                raise ValueError("give seed= or generator=, not both: a seed leaves nothing to draw")
            if not isinstance(generator, torch.Generator):
                raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
            defaults["seed"] = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
        self._batches: dict[int, tuple[object, list[Batch]]] = {}
        self._fused = fused
        super().__init__(params, defaults)
        self._seed_groups()

    def _seed_groups(self) -> None:
        """Set a drawn seed in groups without one: all groups, those added later, and those whose seed was removed."""
        for group in self.param_groups:
            if group["seed"] is None:
                group["seed"] = self._draw_seed()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler leaves unscaling and skipping to the step, which then does not wait for the device.

        As in torch's optimizers it does with `fused=True`; then gradients cannot be clipped in between, and Lightning raises an error. By
        default it does for gradients in float16, which a scaler does not unscale itself.
        """
        if self._fused is not None:
            return self._fused
        gradients = (p.grad for group in self.param_groups for p in group["params"])
        return any(gradient is not None and gradient.dtype == torch.float16 for gradient in gradients)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; see `torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1], self._firsts()[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def set_options(self, **options: Any) -> None:
        """Change how all groups round from the next step on; everything is checked before anything changes.

        States are kept, and converted if their format changes; the compensations of Kahan summation end with it.

        Args:
            **options: `format`, `update`, `state`, `state_rounding`, `arithmetic` and `overflow`, as the optimizer takes them.

        Raises:
            ValueError: If options are unknown, incompatible, or do not fit a parameter.

        Example:
            >>> import torch, qsim
            >>> optimizer = qsim.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, update="nearest")
            >>> optimizer.set_options(update="stochastic", format="bf16")
            >>> optimizer.param_groups[0]["update"], optimizer.param_groups[0]["format"]
            ('stochastic', 'bf16')
        """
        for group, checked in zip(self.param_groups, self.checked_options(**options), strict=True):
            group.update(checked)
            for p in group["params"] if kahan.read(group["update"]) is None else ():
                self.state.get(p, {}).pop("compensation", None)

    def checked_options(self, **options: Any) -> list[dict[str, Any]]:
        """All options of each group as `set_options` would set them."""
        for name in options:
            if name not in _ROUNDING:
                raise ValueError(f"{type(self).__name__}: options of rounding are {', '.join(_ROUNDING)}; got {name!r}")
        groups = [{**group, **options} for group in self.param_groups]
        for group, first in zip(groups, self._firsts(), strict=True):
            self._check(group, first)
        return groups

    @disable_dynamo  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients.

        Args:
            closure: Recomputes the loss and the gradients.

        Returns:
            The closure's result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if loss is None:
                raise ValueError("step: the closure must return the loss, got None")
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self._seed_groups()
        firsts = self._firsts()
        # All errors are raised before the first group is updated.
        keys = [self._checked(index, first) for index, first in enumerate(firsts)]
        algorithms = [self._algorithm(group) for group in self.param_groups]
        self._agree()
        moving = [self._batches_of(index, first, key) for index, (first, key) in enumerate(zip(firsts, keys, strict=True))]
        for group, algorithm, batches in zip(self.param_groups, algorithms, moving, strict=True):
            for batch in batches:
                batch.update(_number(group["lr"]), grad_scale, found_inf, group["seed"], algorithm)
        return loss

    def _agree(self) -> None:
        """Make all processes agree on the drawn seed, once a step needs it."""
        groups = [group for group in self.param_groups if self._drawn is not None and group["seed"] == self._drawn]
        params = [p for group in groups for p in group["params"]]
        if any(map(_draws, groups)):
            seed = self._agreed_seed(groups[0]["seed"], params)
            for group in groups:
                group["seed"] = seed

    def _firsts(self) -> list[int]:
        """The number of each group's first parameter in the optimizer."""
        return list(accumulate((len(group["params"]) for group in self.param_groups), initial=0))[:-1]

    def _checked(self, index: int, first: int) -> tuple[object, ...]:
        """Return the cache key of a group's batches; if it differs from the last step's, the group is checked again."""
        group = self.param_groups[index]
        _check_learning_rate(group["lr"])
        grads = [p.grad for p in group["params"]]
        # Models and their gradients may change device and dtype, as a whole or in part.
        kinds = tuple([None if g is None else (g.dtype, g.device, g.layout, type(g)) for g in grads])
        # A momentum that is set later needs a state, and so does AMSGrad.
        states = bool(group.get("momentum")), bool(group.get("amsgrad"))
        key = (_setting_options(group), states, first, kinds, tuple(map(id, group["params"])), group["seed"])
        if self._batches.get(index, (None,))[0] != key:
            self._check(group, first)
            check_gradients(group["params"], first, _setting_options(group))
            # Checking has converted the options to strings.
            key = (_setting_options(group), *key[1:])
        return key

    def _batches_of(self, index: int, first: int, key: tuple[object, ...]) -> list[Batch]:
        """The parameters of a group that have gradients, as the operator takes them; reused from the last step if nothing has changed."""
        known, batches = self._batches.get(index, (None, []))
        if known != key or not all(batch.is_of(self.state) for batch in batches):
            group = self.param_groups[index]
            chosen = _setting_options(group)
            batches = batches_of(group["params"], self.state, first, chosen, lambda setting: self._states(group, setting))
            # With the seed that has been agreed on meanwhile.
            self._batches[index] = (*key[:-1], group["seed"]), batches
        return batches

    def _check(self, group: dict[str, Any], first: int) -> None:
        """Raise an error for incompatible options and parameters, and store formats and roundings as strings.

        Args:
            group: The group.
            first: Number of its first parameter in the optimizer.
        """
        if "weight" in group:
            raise TypeError(f"the format of weights is the option format=, got weight={group['weight']!r}")
        # Other keys are ignored, as in torch's optimizers, and may be another library's.
        for key in group.keys() - self.defaults.keys():
            for meant in difflib.get_close_matches(str(key), [*_ROUNDING, "seed"], n=1, cutoff=0.8):
                raise ValueError(f"{type(self).__name__}: a parameter group has the key {key!r}: did you mean {meant!r}?")
        group["format"], group["state"] = settings.name_of_format(group["format"]), settings.name_of_format(group["state"])
        group["update"] = settings.name_of_update(group["update"])
        group["state_rounding"] = settings.name_of_rounding(group["state_rounding"])
        if group["seed"] is not None:
            seeds.check_source(group["seed"], None, torch.device("cpu"))
            group["seed"] = int(group["seed"])
        _check_learning_rate(group["lr"])
        self._algorithm(group)
        for number, p in enumerate(group["params"], start=first):
            if p.layout != torch.strided:
                raise TypeError(f"parameter {number} must be dense, got layout {p.layout}")
            if p.dtype not in settings.DTYPES:
                raise TypeError(f"parameter {number} must be bfloat16, float16 or float32, got {p.dtype}")
            self._check_setting(group, settings.setting(*_setting_options(group), p.dtype))

    def _check_setting(self, group: dict[str, Any], setting: UpdateSetting) -> None:
        """Raise an error for numbers that a setting would round away."""

    def _algorithm(self, group: dict[str, Any]) -> str:
        """A group's update rule as text (see `qsim_kernels.numbers.updates`); its numbers are checked at every step."""
        raise NotImplementedError

    def _states(self, group: dict[str, Any], setting: UpdateSetting) -> dict[str, torch.dtype]:
        """The states that a group's parameters have, and their dtypes."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state_dict of this optimizer, or of torch's optimizer of the same name.

        Options are loaded too, as in torch's optimizers; the options of this optimizer apply where the state_dict has none.

        Raises:
            ValueError: If it belongs to another model or another optimizer.
        """
        seen: StateDict = {}

        def adapt(_: torch.optim.Optimizer, given: StateDict) -> StateDict:
            seen.update(adapted(given, self.param_groups, self.STATES))
            for saved, group, first in zip(seen["param_groups"], self.param_groups, self._firsts(), strict=True):
                # Before anything is loaded.
                self._check({**saved, "params": group["params"]}, first)
            return seen

        hook = self.register_load_state_dict_pre_hook(adapt)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        for group, first in zip(self.param_groups, self._firsts(), strict=True):
            self._check(group, first)
        # torch casts states to their parameter's dtype, and loses their extra bits.
        restored(self.state, seen, self.param_groups, self._dtypes)

    def _dtypes(self, group: dict[str, Any], p: Tensor) -> dict[str, torch.dtype]:
        return self._states(group, settings.setting(*_setting_options(group), p.dtype))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._batches = {}

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in super().__getstate__().items() if name != "_batches"}
        return {**kept, "_fused": self._fused, "_drawn": self._drawn}


#: The options that say how a group is rounded.
_ROUNDING = ("format", "update", "state", "state_rounding", "arithmetic", "overflow")


_setting_options: Callable[[dict[str, Any]], Options] = itemgetter(*_ROUNDING)


def _draws(group: dict[str, Any]) -> bool:
    """Whether an update of a group draws random bits."""
    options = _setting_options(group)
    return any(settings.setting(*options, dtype).draws for dtype in {p.dtype for p in group["params"]})


def _number(lr: float | Tensor) -> Tensor:
    return lr if isinstance(lr, Tensor) else _tensor(float(lr))


@lru_cache(maxsize=64)
def _tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64, device="cpu")


def _check_learning_rate(lr: Any) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.is_floating_point():
            raise ValueError(f"lr must be a number or a tensor of one, got a tensor of shape {tuple(lr.shape)} in {lr.dtype}")
    else:
        check_number("lr", lr)


def check_number(name: str, value: Any, below: float = float("inf")) -> None:
    """Raise an error unless a number is finite, not negative and below a limit."""
    check_real(name, value)
    if not 0 <= value < below:
        raise ValueError(f"{name} must be in [0, {below:g}), got {value}")


def check_real(name: str, value: Any) -> None:
    """Raise an error for a value that is not a number; NumPy's numbers, which schedulers produce, are allowed."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
