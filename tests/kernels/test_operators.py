"""The operators as torch sees them: opcheck, fake tensors, functionalization, export, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import qsim
from qsim import rounding as roundings
from qsim.formats import E4M3, E5M2, Float, Format, Int
from qsim.random import Noise
from qsim_kernels.numbers.grid import spell
from support.calls import CALLS, STREAM, points, same

OPERATORS = torch.ops.qsim


@pytest.fixture
def x(device: torch.device) -> Tensor:
    """Four rows of three values."""
    return points(device)


def rule(rounding: str | roundings.Rounding, overflow: str = "saturate") -> str:
    """A rounding as an operator argument."""
    return spell(roundings.resolve(rounding).rule(overflow))


PLAIN = [
    (E4M3, rule("nearest"), None, 0, 0),
    (E5M2, rule("odd", "nonfinite"), None, 0, 0),
    (Int(8), rule("nearest_up"), None, 0, 0),
]
SEEDED = [
    (E4M3, rule("stochastic"), 5, 0, 0),
    (Float(4, 3, specials="ieee", subnormals=False), rule(qsim.Stochastic(6, True), "nonfinite"), -1, STREAM, 2**40 + 3),
]
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced bf16": lambda x: x.bfloat16()[:, 1:],
    "0-d double": lambda x: x.double()[0, 0],
    "empty fp16": lambda x: x.half()[:0],
}
#: Every view with and without a seed. The format is a string among the arguments, independent of the view.
GIVEN = [(view, arguments[turn % len(arguments)]) for turn, view in enumerate(VIEWS) for arguments in (PLAIN, SEEDED)]


@pytest.mark.parametrize(("view", "arguments"), GIVEN, ids=lambda part: part if isinstance(part, str) else repr(part[0]))
class TestOpcheck:
    @pytest.fixture
    def given(self, device: torch.device, view: str) -> Tensor:
        # No NaN: opcheck does not consider it equal to itself.
        return VIEWS[view](points(device).nan_to_num(7.0, posinf=torch.inf))

    @pytest.fixture
    def numbers(self, device: torch.device, arguments: Any) -> tuple[Format, Tensor | None, str, tuple[int, int]]:
        """A format, a seed, a rounding, and (stream, offset)."""
        fmt, how, seed, stream, offset = arguments
        return fmt, None if seed is None else torch.tensor(seed, device=device), how, (stream, offset)

    @pytest.mark.sampled(24)
    def test_quantize(self, given: Tensor, numbers: Any) -> None:
        fmt, seed, how, noise = numbers
        for dtype in {given.dtype, torch.float64}:
            torch.library.opcheck(OPERATORS.quantize.default, (given, seed, spell(fmt.grid), how, *noise, dtype))

    @pytest.mark.sampled(3)
    def test_quantize_in_place(self, given: Tensor, numbers: Any) -> None:
        fmt, seed, how, noise = numbers
        torch.library.opcheck(OPERATORS.quantize_.default, (given.clone(), seed, spell(fmt.grid), how, *noise))

    @pytest.mark.sampled(6)
    def test_quantize_out(self, given: Tensor, numbers: Any) -> None:
        fmt, seed, how, noise = numbers
        out = torch.empty_like(given, dtype=torch.float32)
        torch.library.opcheck(OPERATORS.quantize_out.default, (given, seed, spell(fmt.grid), how, *noise, out))

    @pytest.mark.sampled(6)
    def test_encode_and_decode(self, given: Tensor, numbers: Any) -> None:
        fmt, seed, how, noise = numbers
        for check in (True, False):
            torch.library.opcheck(OPERATORS.encode.default, (given, seed, spell(fmt.grid), how, spell(fmt.coding), *noise, check))
        codes = OPERATORS.encode(given, seed, spell(fmt.grid), how, spell(fmt.coding), *noise, True)
        for dtype in (torch.float32, torch.float64):
            torch.library.opcheck(OPERATORS.decode.default, (codes, spell(fmt.grid), spell(fmt.coding), dtype))


def test_stochastic_rounding_needs_a_seed(x: Tensor) -> None:
    with pytest.raises(ValueError, match="stochastic rounding needs a seed"):
        OPERATORS.quantize(x, None, spell(E4M3.grid), rule("stochastic"), 0, 0, torch.float32)
    with pytest.raises(ValueError, match="stochastic rounding needs a seed"):
        OPERATORS.encode(x, None, spell(E4M3.grid), rule("stochastic"), spell(E4M3.coding), 0, 0, True)


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_know_dtype_shape_and_strides(x: Tensor, name: str) -> None:
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x[:2].contiguous().t(),
        lambda x: torch.stack([x] * 2).transpose(0, 2)[:, ::2],
        lambda x: x[:0],
    ]
    for view in views if name != "packed" else views[:1]:
        true = CALLS[name](view(x))
        with FakeTensorMode() as mode:
            fake = CALLS[name](view(mode.from_tensor(x)))
        assert (fake.dtype, fake.device, fake.shape, fake.stride()) == (true.dtype, true.device, true.shape, true.stride())


@pytest.mark.parametrize("name", ["nearest", "stochastic", "encode", "decode"])
def test_functionalized(x: Tensor, name: str) -> None:
    # Operators that write to an argument are left out: torch.func.functionalize only supports torch's own. The compiler's
    # functionalization supports them, and opcheck and the compiled calls use it.
    before = x.clone()
    assert same(torch.func.functionalize(CALLS[name])(x), CALLS[name](x))
    assert same(x, before)


class Layer(torch.nn.Module):
    """A product of quantized tensors, as in an exported program."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-2, 2, 12).view(3, 4))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        """Round both factors, and decode the codes of one of them."""
        coarse = qsim.decode(qsim.encode(x, "bf16"), "bf16")
        return qsim.quantize(coarse, "e4m3", **self.options) @ qsim.quantize(self.weight, "e2m1")


@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "seed": Noise(5, 9)}], ids=["nearest", "stochastic"])
def test_export(options: dict[str, Any]) -> None:
    layer = Layer(**options).eval()
    x = torch.randn(5, 3)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"qsim.quantize.default", "qsim.encode.default", "qsim.decode.default"} <= called
    for rows in (5, 8):
        x = torch.randn(rows, 3)
        assert torch.equal(program.module()(x), layer(x))


def test_exported_program_draws_fresh_noise() -> None:
    layer = Layer(rounding="stochastic").eval()
    x = torch.full((64, 3), 1.0625)
    program = torch.export.export(layer, (x,)).module()
    assert not torch.equal(program(x), program(x))


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(x: Tensor, lower: torch.dtype) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = x.to(dtype)
        plain = [call(given) for name, call in CALLS.items() if name != "packed"]
        with torch.autocast(x.device.type, dtype=lower):
            within = [call(given) for name, call in CALLS.items() if name != "packed"]
        assert all(same(a, b) for a, b in zip(plain, within, strict=True))
