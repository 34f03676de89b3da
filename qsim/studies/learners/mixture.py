"""A GPT whose perceptrons are mixtures of experts: each token goes to the few experts that a router chooses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsim.private import grouped_mm
from qsim.studies.learners.gpt import GPT, GPTSize, TransformerBlock


class Mixture(nn.Module):
    """Experts with one hidden layer each, and the router that chooses among them.

    Products are grouped by expert, and computed in bfloat16, as `torch.nn.functional.grouped_mm` does on every device.

    Args:
        width: The width of the model; that of an expert's hidden layer is twice as large.
        experts: The number of experts.
        active: The number of experts of a token.
    """

    def __init__(self, width: int, experts: int, active: int) -> None:
        super().__init__()
        self.active = active
        self.router = nn.Linear(width, experts, bias=False)
        self.expand = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.contract = nn.Parameter(torch.empty(experts, 2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the chosen experts' results, weighted by the router."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.active, -1)
        order = chosen.flatten().argsort(stable=True)
        # In place of `bincount`, which waits for the GPU.
        counts = (chosen.flatten()[:, None] == torch.arange(len(self.expand), device=x.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        rows = tokens[order // self.active].bfloat16()
        hidden = F.gelu(grouped_mm(rows, self.expand.bfloat16(), offs=ends), approximate="tanh")
        found = grouped_mm(hidden, self.contract.bfloat16(), offs=ends).float() * weights.flatten()[order, None]
        return torch.zeros_like(tokens, dtype=torch.float32).index_add(0, order // self.active, found).to(x.dtype).view_as(x)


class _MixtureBlock(TransformerBlock):
    """Attention, then a mixture of experts."""

    def __init__(self, size: GPTSize, experts: int, active: int) -> None:
        super().__init__(size)
        self.up = self.down = None  # type: ignore[assignment]
        self.mixture = Mixture(size.width, experts, active)

    def perceptron(self, x: Tensor) -> Tensor:
        """The experts' addition to the residual stream."""
        added: Tensor = self.mixture(x)
        return added


class MixtureGPT(GPT):
    """A GPT with a mixture of experts in each block.

    Args:
        size: The size of the rest.
        vocabulary: The number of tokens.
        context: The length of sequences.
        experts: The number of experts per block.
        active: The number of experts of a token.

    Example:
        >>> import torch
        >>> from qsim.studies.learners.gpt import size
        >>> model = MixtureGPT(size("tiny"), 256, 32, experts=4, active=2)
        >>> model(torch.zeros(4, 32, dtype=torch.long)).shape
        torch.Size([4, 32, 256])
    """

    def __init__(self, size: GPTSize, vocabulary: int, context: int, *, experts: int, active: int) -> None:
        super().__init__(size, vocabulary, context, lambda: _MixtureBlock(size, experts, active))
