"""GPT-2's model in plain torch: blocks that normalize what they read, learnt positions, an embedding that is also the last weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTSize:
    """The size of a GPT."""

    layers: int
    width: int
    heads: int


SIZES = {
    "tiny": GPTSize(2, 64, 2),
    "mini": GPTSize(4, 128, 4),
    "small": GPTSize(12, 768, 12),
    "medium": GPTSize(24, 1024, 16),
    "large": GPTSize(36, 1280, 20),
    "neo-1.3b": GPTSize(24, 2048, 16),
    "neo-2.7b": GPTSize(32, 2560, 20),
}


def size(name: str) -> GPTSize:
    """A size by its name: `"small"`, `"medium"` and `"large"` are GPT-2's, `"neo-1.3b"` and `"neo-2.7b"` have GPT-Neo's blocks and widths.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in SIZES:
        raise ValueError(f"size: must be one of {', '.join(SIZES)}; got {name!r}")
    return SIZES[name]


class TransformerBlock(nn.Module):
    """Attention, then a perceptron with one hidden layer."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.merge = nn.Linear(size.width, size.width)
        self.before_mlp = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream behind this block."""
        query, key, value = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).flatten(-2))
        return x + self.perceptron(self.before_mlp(x))

    def perceptron(self, x: Tensor) -> Tensor:
        """The hidden layer's addition to the residual stream."""
        added: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return added


class GPT(nn.Module):
    """A decoder, which gives logits.

    Args:
        size: What it is made of.
        vocabulary: How many tokens there are.
        context: How long sequences may be.
        block: A function that makes a block; None: `TransformerBlock`.

    Example:
        >>> import torch
        >>> model = GPT(size("tiny"), 256, 32)
        >>> model(torch.zeros(4, 32, dtype=torch.long)).shape
        torch.Size([4, 32, 256])
    """

    def __init__(self, size: GPTSize, vocabulary: int, context: int, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(context, size.width)
        self.blocks = nn.ModuleList(TransformerBlock(size) if block is None else block() for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                # What two layers a block add to the residual stream begins smaller the more blocks there are.
                adds = name.endswith(("merge.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each next token."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def parameters(size: GPTSize, vocabulary: int, context: int) -> int:
    """The number of parameters of a GPT.

    Example:
        >>> parameters(size("small"), 50257, 1024)
        124439808
    """
    with torch.device("meta"):
        return sum(weight.numel() for weight in GPT(size, vocabulary, context).parameters())


def language_loss(model: nn.Module, sequences: Tensor) -> Tensor:
    """The mean loss of predicting each token from those before it, computed in float32.

    Args:
        model: Gives logits.
        sequences: Tokens, of any integer dtype, one more than the model is to read.
    """
    tokens = sequences.long()
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
