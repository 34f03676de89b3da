"""The similarity of consecutive training steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Correlations:
    """The similarity of a model's gradients and updates from one step to the next: the cosine of their angle.

    Args:
        model: The model that is trained.
        first: The first step to compare.
    """

    def __init__(self, model: nn.Module, first: int) -> None:
        self._weights, self._first = list(model.parameters()), first
        self._gradients: list[Tensor] | None = None
        self._before: list[Tensor] | None = None
        self._update: list[Tensor] | None = None
        self._found: dict[str, list[Tensor]] = {"gradients": [], "updates": []}

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        """Record gradients after a backward pass, before the update."""
        if step < self._first:
            return
        gradients = [weight.grad.float() for weight in self._weights if weight.grad is not None]
        if self._gradients is not None:
            self._found["gradients"].append(_cosine(gradients, self._gradients))
        weights = [weight.detach().float() for weight in self._weights]
        if self._before is not None:
            update = torch._foreach_sub(weights, self._before)
            if self._update is not None:
                self._found["updates"].append(_cosine(update, self._update))
            self._update = list(update)
        # `float` copies bfloat16, but not float32.
        self._gradients, self._before = [g.clone() for g in gradients], [w.clone() for w in weights]

    def means(self) -> dict[str, float | None]:
        """The means over steps, of `gradients` and of `updates`; None if there are no steps, or one is NaN."""
        means = {name: torch.stack(found).mean().item() if found else math.nan for name, found in self._found.items()}
        return {name: None if math.isnan(mean) else mean for name, mean in means.items()}


def _cosine(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    products = [torch.stack([(a * b).sum() for a, b in zip(x, y, strict=True)]).sum() for x, y in
                ((first, second), (first, first), (second, second))]  # fmt: skip
    return products[0] / (products[1] * products[2]).sqrt()
