"""The two modes of schedule-free optimizers, between which `train()` and `eval()` switch the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qsim.optim.wrapper import Wrapper


class SwitchesModes(Wrapper):
    """A wrapper that has `train` and `eval` if the wrapped optimizer has them."""

    @property
    def train(self) -> Callable[[], None]:
        """Switch the optimizer to training, if it has such a method: its weights are those at which gradients are taken.

        The optimizer computes the unrounded weights again. In a dtype with more bits than the format of the weights, or of the accumulator,
        round-to-nearest restores the weights from before `eval()`; otherwise the optimizer's rounding errors remain, as without
        this class.

        Raises:
            AttributeError: If the optimizer has no `train`; `hasattr` is False then.
        """
        return self._switch_to("train")

    @property
    def eval(self) -> Callable[[], None]:
        """Switch the optimizer to evaluation, if it has such a method: its weights are those used to evaluate the model.

        After a step they are rounded according to `weight`.

        Raises:
            AttributeError: If the optimizer has no `eval`; `hasattr` is False then.
        """
        return self._switch_to("eval")

    def _switch_to(self, mode: str) -> Callable[[], None]:
        if not callable(getattr(self.optimizer, mode, None)):
            raise AttributeError(
                f"{type(self).__name__}: {type(self.optimizer).__name__} has no {mode}(); schedule-free optimizers have one"
            )
        return partial(self._switch, mode)

    def _switch(self, mode: str) -> None:
        """Call the optimizer's method of this name, and round the weights that it leaves."""
        raise NotImplementedError
