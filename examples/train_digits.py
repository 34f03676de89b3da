"""A small net learns handwritten digits in eight bits, and in formats so coarse that only stochastic rounding lets it learn.

Run it with `python examples/train_digits.py`, in less than 20 seconds on two cores. It needs scikit-learn, whose images it learns from:
`pip install -e '.[study]'`.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Float, Quantizer

STEPS, BATCH = 200, 256
E4M0 = Float(4, 0)  # zero and powers of two, the smallest of them 2**-6
NOISY = Quantizer(E4M0, "stochastic")

VARIANTS = {
    "float32 everywhere": FivePoint(),
    "E4M3 forward, E5M2 gradients": FivePoint("e4m3", "e4m3", "e5m2"),
    "E4M0 backward, nearest": FivePoint(act_bwd=E4M0, grad=E4M0),
    "E4M0 backward, stochastic": FivePoint(act_bwd=NOISY, grad=NOISY),
}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels: one half for training, one for testing."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    half = len(y) // 2
    return x[:half], y[:half], x[half:], y[half:]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def train(points: FivePoint, x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Train a net by SGD with momentum; the seed determines weights, batches and random bits."""
    torch.manual_seed(seed)
    model = qsim.convert(net(), points)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(len(y), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        schedule.step()
    return model


def main() -> None:
    torch.set_num_threads(1)  # tensors this small are not worth a second thread
    x, y, test_x, test_y = digits()
    print(f"{STEPS} steps of {BATCH} images\n")
    print(f"{'':<30}  test accuracy  seconds")
    for name, points in VARIANTS.items():
        begin = time.perf_counter()
        model = train(points, x, y, seed=0)
        with torch.no_grad():
            accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
        print(f"{name:<30}  {accuracy:>13.1%}  {time.perf_counter() - begin:>7.1f}")
    print(f"\nThe loss is a mean over {BATCH} images: no gradient of an output exceeds 1/{BATCH}, less than half of {E4M0.smallest},")
    print("the smallest number of E4M0. To nearest all of them become zero, and the net learns nothing but its last bias,")
    print("whose gradient is not rounded. Stochastic rounding keeps gradients on average.")


if __name__ == "__main__":
    main()
