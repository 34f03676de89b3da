"""A wrapper around an optimizer that schedulers, scalers and checkpoints can use like the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Wrapper(torch.optim.Optimizer):
    """Base class that shares parameter groups, state and defaults with the wrapped optimizer, and has its own hooks.

    Attributes:
        optimizer: The wrapped optimizer.
    """

    optimizer: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to `None`, or to zero."""
        self.optimizer.zero_grad(set_to_none)

    def _wrap(self, **attributes: Any) -> None:
        """Initialize. Torch's constructor would create groups and a state, which already exist."""
        self.__dict__.update(attributes)
        # Creates the hook registries, and makes `step` call them.
        super().__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        # Like torch's optimizers, and as schedulers expect: without hooks or wrappers of `step`.
        return {name: value for name, value in self.__dict__.items() if name in self._attributes}

    #: The attributes of the wrapper itself, copied with it.
    _attributes: tuple[str, ...] = ("optimizer",)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _saved(self) -> dict[str, Any]:
        """The state_dict, before hooks see it."""
        return self.optimizer.state_dict()

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict after the hooks."""
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """The state in plain containers, as torch's optimizers return it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = self._saved()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict.

        Args:
            state_dict: The state to load; it is not changed.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
