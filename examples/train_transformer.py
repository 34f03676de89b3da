"""A small transformer reads Python, in full precision, in FP8 and in FP4.

Run it with `python examples/train_transformer.py`, or with `--steps 400` to see it learn more. It belongs to docs/guides/fp8-fp4.md.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import qsim

WIDTH, CONTEXT, BATCH = 64, 32, 16
# The last layer is the head, which is not converted anyway: NVFP4 need not keep another one in high precision.
RECIPES = {"float32": None, "fp8_hybrid": "fp8_hybrid", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4.with_(last=0)"}


class Transformer(nn.Module):
    """A model that predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(128, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.norm = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character at each position."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden: Tensor = self.layers(self.embed(tokens) + self.places, mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def characters() -> Tensor:
    """A source file of Python's standard library, as numbers below 128."""
    return torch.tensor(list(Path(argparse.__file__).read_bytes().decode("ascii", "replace").encode("ascii", "replace")))


def entropy(text: Tensor) -> float:
    """The loss of a model that knows the frequency of each character but sees no context."""
    shares = text.bincount() / len(text)
    return -(shares * shares.log())[shares > 0].sum().item()


def train(recipe: str | None, text: Tensor, steps: int) -> tuple[float, int]:
    """Train; return the mean loss of the last ten steps, and the number of layers that round."""
    torch.manual_seed(0)
    model = Transformer()
    if recipe is not None:
        qsim.convert(model, recipe, exclude=["head"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(1)  # a separate generator: layers with noise draw from torch's
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=draw)
        tokens = text[starts + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10, len(qsim.nn.conversion(model).changed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # tensors this small are not worth a second thread
    text = characters()
    print(f"{len(text)} characters; {steps} steps of {BATCH} times {CONTEXT}")
    print(f"without looking at the characters before, a model can reach a loss of {entropy(text):.2f}\n")
    print(f"{'':<10}  layers that round    loss  seconds")
    for name, recipe in RECIPES.items():
        begin = time.perf_counter()
        loss, layers = train(recipe, text, steps)
        print(f"{name:<10}  {layers:>17}  {loss:>6.4f}  {time.perf_counter() - begin:>7.1f}")


if __name__ == "__main__":
    main()
