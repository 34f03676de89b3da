"""Five methods of training in BF16, which differ in where they keep more than 16 bits and in how they round updates."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import qsim

METHODS = {
    "stochastic": "everything in BF16, updates rounded stochastically",
    "kahan": "everything in BF16, and what an update loses kept next to the weight",
    "nearest": "everything in BF16, updates rounded to nearest",
    "o1": "weights and their updates in FP32, products in BF16 by autocast",
    "o2": "weights and gradients in BF16, updates of a copy of the weights in FP32",
}
FLOAT32_WEIGHTS = "o1"
FLOAT32_COPY = "o2"


def to_dtype(model: nn.Module, method: str) -> nn.Module:
    """Convert the weights to the method's dtype. All methods start from the same weights, which are BF16 numbers."""
    model.bfloat16()
    return model.float() if method == FLOAT32_WEIGHTS else model


def autocast(method: str, device: torch.device) -> torch.autocast:
    """The autocast context of a forward pass."""
    return torch.autocast(device.type, torch.bfloat16, enabled=method == FLOAT32_WEIGHTS)


class Updates:
    """A method's weight updates: AdamW on clipped gradients.

    Args:
        method: One of `METHODS`.
        model: The model to train.
        betas: AdamW's betas.
        weight_decay: Weight decay of matrices; biases and norm parameters have none.
        clip: The largest total norm of all gradients; 0 for no limit.
        seed: The seed of stochastic rounding's random bits.

    Attributes:
        owner: The module whose parameters the optimizer updates: the model, or the copy of its weights. It and the optimizer suffice
            to resume a run.
        optimizer: The optimizer.
    """

    def __init__(self, method: str, model: nn.Module, *, betas: tuple[float, float], weight_decay: float, clip: float, seed: int) -> None:
        self.clip = clip
        self.weights = list(model.parameters())
        self.owner = model
        if method == FLOAT32_COPY:
            self.owner = nn.ParameterList(weight.detach().float() for weight in self.weights)
        groups = [
            {"params": [parameter for parameter in self.owner.parameters() if parameter.dim() > 1], "weight_decay": weight_decay},
            {"params": [parameter for parameter in self.owner.parameters() if parameter.dim() <= 1], "weight_decay": 0.0},
        ]
        if method in (FLOAT32_WEIGHTS, FLOAT32_COPY):
            self.optimizer = torch.optim.AdamW(groups, betas=betas, fused=self.weights[0].is_cuda)
        else:
            self.optimizer = qsim.optim.AdamW(groups, betas=betas, update=method, seed=seed)

    def step(self, rate: float) -> None:
        """Update the weights and release the gradients."""
        if self.clip:
            nn.utils.clip_grad_norm_(self.weights, self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._copies:
            for copy, weight in zip(self.owner.parameters(), self.weights, strict=True):
                copy.grad, weight.grad = weight.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.hand_down()

    @torch.no_grad()
    def hand_down(self) -> None:
        """Copy the weights from their high-precision copy, if any, to the model."""
        if self._copies:
            torch._foreach_copy_([_own(weight) for weight in self.weights], [_own(copy) for copy in self.owner.parameters()])

    @property
    def _copies(self) -> bool:
        return isinstance(self.owner, nn.ParameterList)


def _own(x: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
