"""Emulated FP8 products compared with those of tensor cores: the same operands, byte for byte; sums differ by narrow accumulators.

As a script, `PYTHONPATH=.:kernels:tests python tests/nn/product/test_silicon.py`, it prints a table of the errors of both against float64,
relative to the sums of the products' magnitudes, which is what rounding errors grow with. `--device cpu` takes torch's product for
processors instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import qsim
from qsim.formats import E4M3, E5M2, Format
from qsim.scaling import PerRow, PerTensor, Scaling

DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}

#: The precision of tensor cores' partial sums of FP8 products: 14 bits or more. Errors stay below the last of these.
NARROW = 2.0**-13
#: The same for products of bfloat16 operands with float32 sums, which may be truncated at each of some hundred steps.
WIDE = 2.0**-18
#: A result in bfloat16, with eight significant bits, is off by at most half a unit in its last place.
BFLOAT16 = 2.0**-8

#: torch's product of FP8 operands; `out_dtype` and `use_fast_accum` are keyword arguments.
Multiply = Callable[..., Tensor]


class Operand(NamedTuple):
    """A matrix in FP8.

    Attributes:
        codes: Its elements' codes.
        scales: Its scales: one, or one for each row.
        format: Its elements' format.
    """

    codes: Tensor
    scales: Tensor
    format: Format

    def elements(self, dtype: torch.dtype) -> Tensor:
        """The elements without their scales, exact in any dtype."""
        return qsim.decode(self.codes, self.format, dtype=dtype)


class Errors(NamedTuple):
    """The error of a product, relative to the sums of magnitudes.

    Attributes:
        max: The largest error.
        rms: The root mean square.
    """

    max: float
    rms: float


@dataclass(frozen=True)
class Case:
    """A product of two matrices, rows times rows.

    Attributes:
        name: A description of its numbers.
        a: The format of the first matrix.
        b: The format of the second matrix.
        scaling: The scales of both.
        sizes: Rows of the first, elements of a row, rows of the second.
    """

    name: str
    a: Format
    b: Format
    scaling: Scaling
    sizes: tuple[int, int, int]

    @property
    def out_dtype(self) -> torch.dtype:
        """Row scales only work with results in bfloat16."""
        return torch.float32 if isinstance(self.scaling, PerTensor) else torch.bfloat16

    def matrices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The numbers, the same on every device."""
        generator = torch.Generator().manual_seed(sum(self.sizes))
        rows, depth, columns = self.sizes
        a, b = (torch.randn(count, depth, generator=generator) for count in (rows, columns))
        if self.name == "heavy tails":
            a = a**3 * torch.linspace(-8, 8, rows)[:, None].exp2()
        return a.to(device), b.to(device)

    def label(self) -> str:
        """The case in a line."""
        names = " × ".join("E4M3" if fmt == E4M3 else "E5M2" for fmt in (self.a, self.b))
        scales = "tensor" if isinstance(self.scaling, PerTensor) else "rows"
        return f"{names}  {scales:<6}  {self.name:<11}  {'×'.join(map(str, self.sizes))}"


CASES = [
    Case(name, a, E4M3, scaling, sizes)
    for a in (E4M3, E5M2)
    for scaling in (PerTensor(), PerRow())
    for name, sizes in (("normal", (512, 4096, 768)), ("heavy tails", (512, 4096, 768)), ("normal", (256, 16384, 256)))
]


def encoded(x: Tensor, fmt: Format, scaling: Scaling) -> Operand:
    """A matrix as encoded by qsim."""
    codes, scales, _ = qsim.encode(x, fmt, scale=scaling)
    return Operand(codes, scales, fmt)


def cast(x: Tensor, operand: Operand) -> Tensor:
    """The bytes of torch's cast of a matrix under the same scales."""
    return (x * operand.scales.reciprocal()).to(DTYPES[operand.format]).view(torch.uint8)


def emulated(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    """The product as emulated by qsim: exact carriers, summed in float32, and multiplied by the scales."""
    if a.codes.is_cuda:
        product = torch.mm(a.elements(torch.bfloat16), b.elements(torch.bfloat16).t(), out_dtype=torch.float32)
    else:
        product = a.elements(torch.float32) @ b.elements(torch.float32).t()
    return (product * a.scales * b.scales.t()).to(out_dtype)


def of_silicon(a: Operand, b: Operand, out_dtype: torch.dtype, multiply: Multiply) -> Tensor:
    """The product of tensor cores; the second operand is passed by columns."""
    left, right = a.codes.view(DTYPES[a.format]), b.codes.view(DTYPES[b.format]).t()
    return multiply(left, right, a.scales, b.scales.t(), out_dtype=out_dtype, use_fast_accum=False)


def exact(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """The product in float64, and the sums of the magnitudes of its terms."""
    left, right = (part.elements(torch.float64) * part.scales.double() for part in (a, b))
    return left @ right.t(), left.abs() @ right.abs().t()


def errors(product: Tensor, due: Tensor, magnitudes: Tensor) -> Errors:
    """The error of a product."""
    relative = (product.double() - due) / magnitudes
    return Errors(relative.abs().max().item(), relative.square().mean().sqrt().item())


class Comparison(NamedTuple):
    """The results for a case.

    Attributes:
        ours: The errors of the emulation.
        silicon: The errors of tensor cores.
        apart: The difference of the two, relative to the same sums.
        rounding: The part that may be due to rounding the result.
        bytes_differ: The number of operand bytes that differ from torch's casts.
    """

    ours: Errors
    silicon: Errors
    apart: Errors
    rounding: float
    bytes_differ: int


def compare(case: Case, device: torch.device, multiply: Multiply) -> Comparison:
    """Encode, multiply both ways, and measure."""
    x, y = case.matrices(device)
    a, b = encoded(x, case.a, case.scaling), encoded(y, case.b, case.scaling)
    differing = sum(int((cast(matrix, operand) != operand.codes).sum()) for matrix, operand in ((x, a), (y, b)))
    due, magnitudes = exact(a, b)
    ours, silicon = emulated(a, b, case.out_dtype), of_silicon(a, b, case.out_dtype, multiply)
    rounding = (due.abs() / magnitudes).max().item() * BFLOAT16 if case.out_dtype == torch.bfloat16 else 0.0
    apart = errors(ours, silicon.double(), magnitudes)
    return Comparison(errors(ours, due, magnitudes), errors(silicon, due, magnitudes), apart, rounding, differing)


def check(found: Comparison) -> None:
    """Assert the same operands, and differences of results that the accumulators explain."""
    assert found.bytes_differ == 0
    assert found.ours.max <= WIDE + found.rounding * (1 + WIDE)
    assert found.silicon.max <= NARROW + found.rounding * (1 + NARROW)
    assert found.apart.max <= NARROW + WIDE + 2 * found.rounding * (1 + NARROW)


def has_tensor_cores() -> bool:
    """Whether there is a GPU that multiplies FP8."""
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=Case.label)
def test_tensor_cores(case: Case) -> None:
    if not has_tensor_cores():
        pytest.skip(f"no FP8 tensor cores: capability {torch.cuda.get_device_capability()} is below 8.9")
    found = compare(case, torch.device("cuda"), torch._scaled_mm)
    check(found)
    if case.out_dtype == torch.float32:
        assert found.ours.rms <= found.silicon.rms


def stand_in(kept: int) -> Multiply:
    """A product with torch's restrictions that truncates its sums to a number of bits after every 128 products."""

    def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
        assert not use_fast_accum
        assert (a.stride(1), b.stride(0)) == (1, 1), "the first operand goes in by rows, the second by columns"
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        sizes = (scale_a.numel(), scale_b.numel())
        assert sizes == (1, 1) or (scale_a.shape, scale_b.shape, out_dtype) == ((len(a), 1), (1, b.shape[1]), torch.bfloat16)
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        total = torch.zeros(len(a), b.shape[1])
        for left, right in zip(a.float().split(128, 1), b.float().split(128, 0), strict=True):
            total += cut(left @ right, kept)
        return (total * scale_a * scale_b).to(out_dtype)

    return multiply


def cut(x: Tensor, kept: int) -> Tensor:
    """float32 numbers truncated to a number of significant bits."""
    return (x.view(torch.int32) >> (24 - kept) << (24 - kept)).view(torch.float32)


SMALL = [
    Case(name, a, E4M3, scaling, (48, 512, 32))
    for name in ("normal", "heavy tails")
    for a in (E4M3, E5M2)
    for scaling in (PerTensor(), PerRow())
]


@pytest.mark.parametrize("case", SMALL, ids=Case.label)
class TestTheComparison:
    """The comparison itself, on products with known errors."""

    def test_narrow_sums_pass(self, case: Case) -> None:
        found = compare(case, torch.device("cpu"), stand_in(14))
        check(found)
        if case.out_dtype == torch.float32:
            assert 0 < 10 * found.ours.rms < found.silicon.rms < NARROW

    def test_narrower_ones_do_not(self, case: Case) -> None:
        with pytest.raises(AssertionError):
            check(compare(case, torch.device("cpu"), stand_in(5)))

    def test_wrong_scales_do_not(self, case: Case) -> None:
        def twice(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **how: object) -> Tensor:
            return stand_in(24)(a, b, 2 * scale_a, scale_b, **how)

        with pytest.raises(AssertionError):
            check(compare(case, torch.device("cpu"), twice))

    def test_errors_by_hand(self, case: Case) -> None:
        x, y = (part[:2] for part in case.matrices(torch.device("cpu")))
        a, b = encoded(x, case.a, case.scaling), encoded(y, case.b, case.scaling)
        due, magnitudes = exact(a, b)
        values = [qsim.quantize(part, fmt, scale=case.scaling).double() for part, fmt in ((x, case.a), (y, case.b))]
        torch.testing.assert_close(due, values[0] @ values[1].t(), rtol=1e-4, atol=1e-4 * magnitudes.max().item())
        off = due.clone()
        off[0, 0] += magnitudes[0, 0] / 4
        assert errors(off, due, magnitudes) == pytest.approx((0.25, 0.125))
        assert errors(due, due, magnitudes) == (0.0, 0.0)


def lines(device: torch.device) -> Iterator[str]:
    """The lines of the table."""
    yield f"{'':<48}{'ours':^22}{'silicon':^22}{'apart':^11}bytes"
    yield f"{'operands, scales, numbers, sizes':<48}{'max':>10}{'rms':>10}  {'max':>10}{'rms':>10}  {'max':>10}  that differ"
    for case in CASES:
        found = compare(case, device, torch._scaled_mm)
        ours, silicon = (f"{part.max:10.1e}{part.rms:10.1e}  " for part in (found.ours, found.silicon))
        yield f"{case.label():<48}{ours}{silicon}{found.apart.max:10.1e}  {found.bytes_differ}"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compares emulated FP8 products with those of tensor cores, both with float64.")
    parser.add_argument("--device", default="cuda", help="where: a GPU unless given; cpu shows torch's product for processors")
    device = torch.device(parser.parse_args(arguments).device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
    print(f"torch {torch.__version__} on {name}; errors relative to the sums of magnitudes; results of rows' scales are in bfloat16")
    for line in lines(device):
        print(line, flush=True)


if __name__ == "__main__":
    main()
