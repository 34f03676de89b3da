"""An optimizer around another one: for schedulers, scalers and checkpoints it is that optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Wrapper(torch.optim.Optimizer):
    """Shares parameter groups, state and defaults with the optimizer that it wraps; hooks on it are its own.

    Attributes:
        optimizer: The optimizer that is wrapped.
    """

    optimizer: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer that is wrapped."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer that is wrapped."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the optimizer that is wrapped."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients to `None`, or to zero."""
        self.optimizer.zero_grad(set_to_none)

    def _wrap(self, **attributes: Any) -> None:
        """What a constructor does. Torch's own would make groups and a state where there are some already."""
        self.__dict__.update(attributes)
        # Makes places for hooks, and has `step` call them.
        super().__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        # As torch's optimizers do, and their schedulers expect: neither hooks nor what others have put around `step`.
        return {name: value for name, value in self.__dict__.items() if name in self._attributes}

    #: What makes the wrapper, and is copied with it.
    _attributes: tuple[str, ...] = ("optimizer",)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _saved(self) -> dict[str, Any]:
        """The state_dict, before hooks see it."""
        return self.optimizer.state_dict()

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state_dict that hooks have seen."""
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """The state in plain containers, as torch's optimizers give it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = self._saved()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` has given.

        Args:
            state_dict: It is not changed.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
