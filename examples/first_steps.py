"""Rounding to nearest forgets small changes; stochastic rounding keeps them on average.

Run it with `python examples/first_steps.py`.
"""

import torch

import qsim


def rounding_one_value() -> None:
    """The mean of many stochastic roundings is the value itself."""
    value = 0.3
    print(f"\n{value} rounded to E4M3, many times over")
    nearest = qsim.quantize(torch.tensor(value), "e4m3").item()
    print(f"  nearest, every time                  {nearest:.6f}")
    for count in (10, 1000, 100_000):
        rounded = qsim.quantize(torch.full((count,), value), "e4m3", rounding="stochastic", seed=0)
        print(f"  stochastic, mean of {count:>7}          {rounded.double().mean().item():.6f}")


def adding_small_steps() -> None:
    """A sum in a narrow format stops growing once half a step of the format exceeds the addend, unless it is rounded stochastically."""
    steps, step, copies = 2000, 0.001, 256
    print(f"\n{steps} times {step} added up in BF16, from 1.0; exactly: {1 + steps * step}")
    for how in ("nearest", "toward_zero", "stochastic"):
        total = torch.ones(copies)
        for index in range(steps):
            qsim.quantize_(total.add_(step), "bf16", rounding=how, seed=index)
        print(f"  {how:<12}  {total.mean().item():.4f}  (mean of {copies} sums)")


def fewer_random_bits() -> None:
    """Hardware draws few random bits; probabilities that they cannot express are rounded, always in the same direction."""
    x = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0)) + 1
    print("\nmean error of a million roundings to E2M1, in units of the spacing")
    for rounding in (qsim.Stochastic(), qsim.Stochastic(bits=6), qsim.Stochastic(bits=2), qsim.Stochastic(bits=2, correction=True)):
        rounded = qsim.quantize(x, "e2m1", rounding=rounding, seed=1)
        print(f"  {rounding!r:<36} {((rounded - x).double().mean() / 0.5).item():+.4f}")


if __name__ == "__main__":
    rounding_one_value()
    adding_small_steps()
    fewer_random_bits()
