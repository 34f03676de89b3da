"""A loss that does not fall, a monitor that says why, and what fixes it.

Run it with `python examples/monitor.py`, or with a folder that it is to write its figures into. It belongs to docs/guides/fp8-fp4.md. It
needs scikit-learn and matplotlib: `pip install -e '.[study]'`.
"""

import math
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer

STEPS, BATCH = 150, 512


def digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)


def train(gradient: Quantizer, loss_scale: float = 1.0) -> tuple[float, qsim.diagnostics.Monitor]:
    """Train; return the last loss, and a monitor's samples of every 25th step."""
    torch.manual_seed(0)
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    qsim.convert(model, FivePoint(grad=gradient))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with qsim.diagnostics.Monitor(model, every=25, optimizer=optimizer) as monitor:
        for _ in range(STEPS):
            chosen = torch.randint(len(y), (BATCH,))
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            optimizer.zero_grad()
            (loss_scale * loss).backward()
            for weight in model.parameters():
                assert weight.grad is not None
                weight.grad /= loss_scale
            optimizer.step()
    return loss.item(), monitor


def main() -> None:
    mpl.use("Agg")  # figures go to files
    torch.set_num_threads(1)  # tensors this small are not worth a second thread
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    narrow, scaled = Quantizer("e3m2"), Quantizer("e3m2", scale=qsim.scaling.PerTensor())
    for name, gradient, loss_scale in (("narrow", narrow, 1.0), ("loss-scale", narrow, 4096.0), ("tensor-scale", scaled, 1.0)):
        loss, monitor = train(gradient, loss_scale)
        print(f"{name}: a loss of {loss:.3f} after {STEPS} steps; chance is {math.log(10):.3f}")
        print(f"{monitor.table()}\n")
        monitor.plot_exponents("4").savefig(folder / f"{name}-exponents.png")
        monitor.plot_shares("4").savefig(folder / f"{name}-shares.png")
    print(f"The loss is a mean over {BATCH} images: no gradient of an output exceeds 1/{BATCH}, less than half of the smallest number,")
    print(f"{narrow.format.smallest:g}. All underflow behind the last layer; what the others get is zero already, and zero is exact.")
    print(f"Figures are in {folder}: {', '.join(sorted(path.name for path in folder.glob('*.png')))}")


if __name__ == "__main__":
    main()
