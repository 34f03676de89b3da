"""`qsim.fpu("bf16")` on float32 compared with torch's bfloat16, bit for bit, for single rounded operators; and other formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

import qsim
from qsim.formats import E4M3, FP16, Float
from support.comparing import is_in, same_bits

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

#: Functions of one operand; torch computes each in float32 and rounds once, and also its gradient where noted.
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("abs", "neg", "exp", "log", "sqrt", "sin", "cos", "tanh", "sigmoid", "reciprocal")},
    **{name: getattr(torch, name) for name in ("square", "floor", "ceil", "round", "trunc", "sign", "expm1", "log1p", "relu", "atan")},
    **{name: getattr(F, name) for name in ("silu", "mish", "softplus", "elu", "selu", "hardswish", "leaky_relu", "relu6", "hardtanh")},
    "x * 0.1": lambda x: x * 0.1,
    "x / 0.3": lambda x: x / 0.3,
    "abs(x) ** 1.5": lambda x: x.abs() ** 1.5,
}
#: Functions of two operands.
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > y, x, y),
}
#: Formats that torch has no dtype for, and one whose overflow is infinite, as in bfloat16.
OTHERS = {"Float(6, 5)": Float(6, 5), "fp16": FP16, "e4m3": E4M3, "fixed": qsim.Fixed(12, 6)}


def every_bf16() -> Tensor:
    """Every bfloat16 number, including infinities."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[~x.isnan()]


def results(function: Callable[..., Tensor], operands: list[Tensor], upstream: Tensor | None = None) -> list[Tensor]:
    """The value and the gradients of a function."""
    given = [x.detach().clone().requires_grad_() for x in operands]
    value = function(*given)
    gradients = torch.autograd.grad(value, given, torch.ones_like(value) if upstream is None else upstream.to(value.dtype))
    return [value.detach(), *gradients]


def check_against_torch(function: Callable[..., Tensor], *operands: Tensor, upstream: Tensor | None = None) -> None:
    """Compare values and gradients in the context with those of bfloat16 tensors; NaN may have the bits of either."""
    own = results(function, list(operands), upstream)
    with qsim.fpu("bf16"):
        emulated = results(function, [x.float() for x in operands], upstream)
    for due, found in zip(own, emulated, strict=True):
        assert found.dtype == torch.float32
        assert same_bits(found.nan_to_num(nan=7.0), due.float().nan_to_num(nan=7.0)), f"{(found != due.float()).sum()} differ"


@pytest.mark.parametrize("name", list(UNARY))
def test_of_one_operand_on_every_number(name: str, device: torch.device) -> None:
    x = every_bf16().to(device)
    with torch.no_grad():
        own = UNARY[name](x)
        with qsim.fpu("bf16"):
            emulated = UNARY[name](x.float())
    assert same_bits(emulated.nan_to_num(nan=7.0), own.float().nan_to_num(nan=7.0))


@pytest.mark.parametrize("name", ["exp", "sqrt", "tanh", "sigmoid", "silu", "relu", "x * 0.1", "x / 0.3"])
def test_of_one_operand_with_gradients(name: str) -> None:
    check_against_torch(UNARY[name], every_bf16())


BITS = st.integers(-(2**15), 2**15 - 1)
PAIRS = st.lists(st.tuples(BITS, BITS, BITS), min_size=1, max_size=40)


@given(st.sampled_from(list(BINARY)), PAIRS)
def test_of_two_operands(name: str, drawn: list[tuple[int, int, int]]) -> None:
    x, y, upstream = torch.tensor(drawn, dtype=torch.int16).view(torch.bfloat16).t().contiguous().unbind()
    check_against_torch(BINARY[name], x, y, upstream=upstream)


@given(st.sampled_from(list(UNARY)), st.lists(BITS, min_size=1, max_size=40))
def test_of_one_operand_in_other_formats_is_rounded_float32(name: str, drawn: list[int]) -> None:
    x = torch.tensor(drawn, dtype=torch.int16).view(torch.bfloat16).float()
    exact = UNARY[name](x)
    for fmt in OTHERS.values():
        if name == "abs(x) ** 1.5":
            overflow = "nonfinite" if fmt.has_inf else "saturate"
            exact = qsim.quantize(x.abs(), fmt, overflow=overflow) ** 1.5
        with qsim.fpu(fmt):
            found = UNARY[name](x)
        assert same_bits(found, qsim.quantize(exact, fmt, overflow="nonfinite" if fmt.has_inf else "saturate"))


def whole(*shape: int, device: torch.device) -> Tensor:
    """Integers whose products add up exactly in float32, in any order, to sums that bfloat16 has to round."""
    return torch.randint(-31, 32, shape).to(device, torch.bfloat16)


@pytest.mark.parametrize("fmt", [None, *OTHERS])
def test_products_without_bias(fmt: str | None, device: torch.device) -> None:
    a, b, batch = whole(33, 65, device=device), whole(65, 17, device=device), whole(3, 65, 9, device=device)
    cases: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (torch.mm, [a, b]),
        (torch.matmul, [a, batch]),
        (F.linear, [a, b.t()]),
        (lambda x, w: F.conv1d(x, w), [whole(2, 5, 20, device=device), whole(4, 5, 3, device=device)]),
    ]
    for function, operands in cases:
        exact = results(function, [x.float() for x in operands])
        assert not all(is_in(x, "bf16") for x in exact)
        if fmt is None:
            check_against_torch(function, *operands)
        else:
            chosen = OTHERS[fmt]
            with qsim.fpu(chosen):
                found = results(function, [x.float() for x in operands])
            overflow = "nonfinite" if chosen.has_inf else "saturate"
            assert all(same_bits(x, qsim.quantize(due, chosen, overflow=overflow)) for x, due in zip(found, exact, strict=True))


def test_softmax_takes_the_gradient_of_what_it_gave() -> None:
    check_against_torch(lambda x: F.softmax(x, -1), torch.randn(40, 50).bfloat16(), upstream=torch.randn(40, 50).bfloat16())


def test_products_of_random_numbers() -> None:
    check_against_torch(torch.mm, torch.randn(33, 65).bfloat16(), torch.randn(65, 17).bfloat16())


@pytest.mark.parametrize("fmt", ["bf16", *OTHERS])
def test_a_network_trains_in_the_format(fmt: str, device: torch.device) -> None:
    """All final tensors are values of the format: weights, gradients, running statistics and the states of its optimizer."""
    chosen = qsim.format(fmt) if fmt == "bf16" else OTHERS[fmt]
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 8, 3), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(48, 16),
        torch.nn.RMSNorm(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4),
    ).to(device)  # fmt: skip
    unit = qsim.fpu(chosen)
    unit.store(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.25, momentum=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    overflow = "nonfinite" if chosen.has_inf else "saturate"
    with unit:
        for _ in range(3):
            optimizer.zero_grad()
            x, y = torch.randn(8, 3, 8, device=device), torch.randint(4, (8,), device=device)
            activations = model[:5](x)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    floats = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    kept = [*floats, *(p.grad for p in model.parameters()), *states, loss, activations]
    assert all(is_in(x, chosen, overflow) for x in kept)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert model[1].num_batches_tracked == 6


#: Ways to write a number into some elements of a 4 × 3 tensor.
INDICES = {
    "a row": 0,
    "an element": (3, 1),
    "a slice": (slice(1, None), 2),
    "everything": ...,
    "a mask": torch.eye(4, 3) > 0,
    "a list": [3, 0],
}


@pytest.mark.parametrize("index", INDICES)
def test_numbers_that_are_written_into_a_tensor(index: str) -> None:
    """As `fill_` and `full` do."""
    x, counts = torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.int64)
    with qsim.fpu("bf16"):
        x[INDICES[index]] = 0.1
        counts[INDICES[index]] = 1001
    assert x[INDICES[index]].unique().tolist() == [torch.tensor(0.1, dtype=torch.bfloat16).item()]
    assert counts[INDICES[index]].unique().tolist() == [1001]


def test_numbers_that_are_written_draw_noise_for_each_element() -> None:
    x = torch.zeros(1000, requires_grad=True) * 1
    with qsim.fpu("e2m1", "stochastic"):
        x[:500] = 0.25
    assert x[:500].unique().tolist() == [0.0, 0.5]
    assert torch.autograd.grad(x.sum(), x)[0].sum() == 1000
    with qsim.fpu("bf16", keep=["setitem"]):
        x[0] = 0.1
    assert x[0] == torch.tensor(0.1)


def test_functions_that_return_before_their_code_runs_are_refused() -> None:
    """A generator's code runs when its caller iterates, outside of the context."""
    with pytest.raises(TypeError, match=r"^fpu: <function .* returns before its code runs, .*: enter the context in the function$"):

        @qsim.fpu("bf16")
        def steps() -> Any:
            yield torch.ones(1) * 0.1

    @qsim.fpu("bf16")
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 0.1

    assert plain(torch.ones(1)).item() == 0.10009765625
