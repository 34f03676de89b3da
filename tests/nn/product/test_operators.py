"""The operators that layers call, as torch sees them: opcheck, fake tensors, compiled code, seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import qsim
from qsim import rounding as roundings
from qsim.formats import E2M1, E4M3, FP16, Float, Format, Int
from qsim.random import places, seeds
from qsim_kernels.numbers.grid import spell
from support.calls import same

pytestmark = pytest.mark.usefixtures("fresh_compiler")

OPERATORS = torch.ops.qsim
View = Callable[[Tensor], Tensor]


def rule(rounding: str | roundings.Rounding, overflow: str = "saturate") -> str:
    """A rounding as an operator argument."""
    return spell(roundings.resolve(rounding).rule(overflow))


ENCODED: dict[str, tuple[Format, str, Format, str]] = {
    "one grid": (E4M3, rule("nearest"), E4M3, rule("stochastic")),
    "four bits": (Int(8), rule("up"), E2M1, rule("nearest", "nonfinite")),
    "sixteen bits": (E4M3, rule(qsim.Stochastic(6, True)), FP16, rule("odd")),
}
SUMMED: dict[str, tuple[Format, str]] = {"nearest": (E4M3, rule("nearest")), "stochastic": (Float(4, 0), rule("stochastic"))}
INPUTS: dict[str, View] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced bf16": lambda x: x.bfloat16()[:, 1:],
    "expanded double": lambda x: x.double()[:1].expand(3, -1),
    "no rows": lambda x: x.half()[:0],
}


@pytest.fixture
def x(device: torch.device) -> Tensor:
    """Sixteen rows of eight values, some of them too large for a format; no NaN, which opcheck does not consider equal to itself."""
    return torch.linspace(-500, 500, 128, device=device).view(16, 8)


def encoded(x: Tensor, name: str, dtype: torch.dtype, seed: Tensor | None = None) -> tuple[Any, ...]:
    """The arguments of `quantize_and_encode`."""
    fmt, how, code_fmt, code_how = ENCODED[name]
    seed = torch.tensor(5, device=x.device) if seed is None else seed
    return x, seed, spell(fmt.grid), how, 1, dtype, spell(code_fmt.grid), code_how, spell(code_fmt.coding), -2


def summed(x: Tensor, name: str, dtype: torch.dtype, seed: Tensor | None = None) -> tuple[Any, ...]:
    """The arguments of `quantize_and_sum`."""
    fmt, how = SUMMED[name]
    return x, torch.tensor(5, device=x.device) if seed is None else seed, spell(fmt.grid), how, 2**40, dtype


def calls(x: Tensor, dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...]]]:
    """Every operator with every setting."""
    found = [(OPERATORS.quantize_and_encode.default, encoded(x, name, dtype)) for name in ENCODED]
    return found + [(OPERATORS.quantize_and_sum.default, summed(x, name, dtype)) for name in SUMMED]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("view", INPUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck(x: Tensor, view: str, dtype: torch.dtype) -> None:
    for operator, arguments in calls(INPUTS[view](x), dtype):
        torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("place", [places.WHOLE, places.Place(5, 3, 100, False)])
def test_opcheck_of_a_weights_seed(x: Tensor, place: places.Place) -> None:
    for view in ("plain", "transposed", "sliced bf16"):
        torch.library.opcheck(OPERATORS.weight_seed.default, (INPUTS[view](x), 7, *place))


@pytest.mark.parametrize("view", INPUTS)
def test_fake_tensors_know_dtype_shape_and_strides(x: Tensor, view: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = INPUTS[view](x)
        true = [each for operator, arguments in calls(given, dtype) for each in operator(*arguments)]
        with FakeTensorMode() as mode:
            fake = [each for operator, arguments in calls(INPUTS[view](mode.from_tensor(x)), dtype) for each in operator(*arguments)]
        facts = [[(each.dtype, each.device, each.shape, each.stride()) for each in results] for results in (true, fake)]
        assert facts[0] == facts[1]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_gives_the_same_bits(x: Tensor, backend: str) -> None:
    def call(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        values, codes = OPERATORS.quantize_and_encode(*encoded(x, "one grid", torch.bfloat16, seed))
        rounded, sums = OPERATORS.quantize_and_sum(*summed(x, "stochastic", torch.float32, seed))
        return values, codes, rounded, sums, OPERATORS.weight_seed(x, 3, 0, 0, 0, True)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for number in (5, -6):
        for given in (x, x[:7]):
            seed = torch.tensor(number, device=x.device)
            assert all(same(a, b) for a, b in zip(compiled(given, seed), call(given, seed), strict=True))


def test_compiled_code_asks_for_the_shared_seed_at_every_call(x: Tensor) -> None:
    compiled = torch.compile(lambda x: seeds.weight_seed(x, 3), fullgraph=True, backend="aot_eager")
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found.append(int(compiled(x)))
        assert found[-1] == int(seeds.weight_seed(x, 3))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(("how", "code_how"), [("stochastic", "nearest"), ("nearest", "stochastic")])
def test_stochastic_rounding_needs_a_seed(x: Tensor, how: str, code_how: str) -> None:
    grid, coding = spell(E4M3.grid), spell(E4M3.coding)
    with pytest.raises(ValueError, match="stochastic rounding needs a seed"):
        OPERATORS.quantize_and_encode(x, None, grid, rule(how), 0, x.dtype, grid, rule(code_how), coding, 0)
    if how == "stochastic":
        with pytest.raises(ValueError, match="stochastic rounding needs a seed"):
            OPERATORS.quantize_and_sum(x, None, grid, rule(how), 0, x.dtype)
