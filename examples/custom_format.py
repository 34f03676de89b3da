"""Formats that no chip has: which values they hold, how far they are off, and how a layer does with them.

Run it with `python examples/custom_format.py`. It belongs to docs/guides/own-format.md.
"""

import torch
from torch import nn

import qsim
from qsim import Fixed, Float

FORMATS = {
    "E3M2": Float(3, 2),
    "E3M2, half its range": Float(3, 2, bias=4),
    "E3M2 as IEEE has it": Float(3, 2, specials="ieee"),
    "E3M2, no subnormals": Float(3, 2, subnormals=False),
    "E2M3": Float(2, 3),
    "fixed point, Q2.3": Fixed(6, 3),
    "E4M3, as OCP has it": qsim.format("e4m3"),
}


def in_decibels(x: torch.Tensor, rounded: torch.Tensor) -> float:
    """The signal-to-error ratio in decibels: ten more mean a tenth of the squared error."""
    signal, error = x.double().square().sum(), (rounded.double() - x.double()).square().sum()
    return float(10 * torch.log10(signal / error))


@torch.no_grad()
def main() -> None:
    print(f"E3M2, from zero on: {' '.join(f'{value:g}' for value in FORMATS['E3M2'].values() if value >= 0)}\n")

    torch.manual_seed(0)
    x = torch.randn(100_000)
    small = 0.02 * x
    layer = nn.Linear(256, 256)
    inputs = torch.randn(64, 256)

    print(f"{'':<21}  bits  values  largest  smallest    N(0, 1)  N(0, 0.02)  scaled    layer")
    for name, fmt in FORMATS.items():
        errors = [in_decibels(numbers, qsim.quantize(numbers, fmt)) for numbers in (x, small)]
        # Divided by their largest magnitude, numbers fill the format's range, wherever it is.
        errors.append(in_decibels(small, qsim.quantize(small, fmt, scale=qsim.scaling.PerTensor())))
        operand = qsim.Quantizer(fmt, scale=qsim.scaling.PerTensor())
        points = qsim.FivePoint(act=operand, weight=operand)
        exact = layer(inputs)
        errors.append(in_decibels(exact, qsim.nn.functional.linear(inputs, layer.weight, layer.bias, points)))
        facts = f"{fmt.bits:>4}  {len(fmt.values()):>6}  {fmt.max:>7g}  {fmt.smallest:>8g}"
        print(f"{name:<21}  {facts}  {errors[0]:>6.1f} dB  {errors[1]:>7.1f} dB  {errors[2]:>3.0f} dB  {errors[3]:>4.1f} dB")

    print("\nNumbers of 0.02 lie below most of what these formats hold; a scale moves them into range.")


if __name__ == "__main__":
    main()
