"""The batch that compensates for fewer bits, and the error that no batch size removes.

Run it with `python examples/batch_size.py`. It is docs/guides/batch-size.md on digits, and needs scikit-learn:
`pip install -e '.[study]'`.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Float, Quantizer

SIZES, DRAWS = (16, 128, 1024), 60


def digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)


def backward(mantissa: int, rounding: str = "stochastic") -> FivePoint:
    """Round the operands of the backward pass to a number of mantissa bits. With eight exponent bits nothing underflows in any batch."""
    operand = Quantizer(Float(8, mantissa), rounding)
    return FivePoint(act_bwd=operand, grad=operand)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss(model, (x, y)), list(model.parameters()))])


def main() -> None:
    torch.set_num_threads(1)  # tensors this small are not worth a second thread
    torch.manual_seed(0)
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    exact = gradient(model, x, y)  # the gradient over all images, before the model has points
    draw = torch.Generator().manual_seed(1)

    print("squared error of a batch's gradient, as a share of the whole gradient's square")
    print(f"{'backward pass':<20}" + "".join(f"  {size:>5} images" for size in SIZES))
    for name, points in {
        "full precision": FivePoint(),
        "E8M1, stochastic": backward(1),
        "E8M0, stochastic": backward(0),
        "E8M0, nearest": backward(0, "nearest"),
    }.items():
        qsim.convert(model, points)
        errors = []
        for size in SIZES:
            chosen = [torch.randint(len(y), (size,), generator=draw) for _ in range(DRAWS)]
            squares = [(gradient(model, x[c], y[c]) - exact).square().sum() / exact.square().sum() for c in chosen]
            errors.append(torch.stack(squares).mean().item())
        print(f"{name:<20}" + "".join(f"  {error:>12.4f}" for error in errors))

    print("\nhow many times larger a batch has to be, for gradients that vary as little as with one bit more")
    print("bits   times   95 % interval")
    batches = [(x[c], y[c]) for c in torch.randint(len(y), (12, 64), generator=draw)]
    for mantissa in (0, 1, 2, 3):
        found = qsim.diagnostics.batch_for(model, loss, batches, backward(mantissa), like=backward(mantissa + 1), draws=4).factor
        print(f"{mantissa:>4}  {found.value:>6.2f}   {found.low:.2f} to {found.high:.2f}")


if __name__ == "__main__":
    main()
