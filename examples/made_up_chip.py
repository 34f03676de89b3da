"""A chip whose only format has six exponent and five mantissa bits: would an unmodified model learn there?

Run it with `python examples/made_up_chip.py`. It belongs to docs/guides/own-chip.md. It needs scikit-learn:
`pip install -e '.[study]'`.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import qsim

STEPS, BATCH = 100, 64
CHIP = qsim.Float(6, 5)
IN_FULL = ["softmax", "cross_entropy"]
UNITS = {
    "float32": qsim.fpu(None),
    "bfloat16": qsim.fpu("bf16"),
    "the chip": qsim.fpu(CHIP),
    "softmax in full": qsim.fpu(CHIP, keep=IN_FULL),
    "and stochastic": qsim.fpu(CHIP, "stochastic", keep=IN_FULL),
}


class Attention(nn.Module):
    """A model that reads the eight rows of an image as eight words. Plain torch code, without any qsim."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(8, 32), nn.Parameter(0.1 * torch.randn(8, 32))
        self.queries, self.keys, self.values = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(8 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Ten logits per image."""
        words = self.embed(x) + self.places
        weights = (self.queries(words) @ self.keys(words).mT / 32**0.5).softmax(-1)
        words = words + weights @ self.values(words)
        logits: Tensor = self.head(self.norm(words).relu().flatten(1))
        return logits


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels: one half for training, one for testing."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order].view(-1, 8, 8) / 16, torch.tensor(labels)[order]
    half = len(y) // 2
    return x[:half], y[:half], x[half:], y[half:]


def train(x: Tensor, y: Tensor, seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(STEPS):
        chosen = torch.randint(len(y), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return model


def main() -> None:
    torch.set_num_threads(1)  # tensors this small are not worth a second thread
    x, y, test_x, test_y = digits()
    print(f"{CHIP.describe()}\n\n{'':<15}    loss  test accuracy  weights in E6M5  seconds")
    for name, unit in UNITS.items():
        begin = time.perf_counter()
        with unit:
            model = train(x, y)
        with torch.no_grad():  # evaluated in float32, whatever the unit was
            loss = nn.functional.cross_entropy(model(x), y).item()
            right = (model(test_x).argmax(1) == test_y).double().mean().item()
            weights = torch.cat([weight.flatten() for weight in model.parameters()])
            share = (qsim.quantize(weights, CHIP) == weights).double().mean().item()
        print(f"{name:<15}  {loss:>6.3f}  {right:>13.1%}  {share:>15.1%}  {time.perf_counter() - begin:>7.1f}")
    print("\nTo nearest, an update of less than 1/128 of a weight is always lost: weights stand still before they are right.")
    print("Stochastically updates arrive on average. That softmax has more bits makes no difference to be seen.")


if __name__ == "__main__":
    main()
