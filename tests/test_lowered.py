"""What compilers see of rounding without random bits: plain torch operators that give the operator's bits, wherever they are fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import inputs
import oracle
import qsim
from catalogue import NAMED, VARIETY
from comparing import same_bits
from covering import dealt
from qsim.formats import E2M1, E4M3, E5M2, E8M0, Fixed, Format, Int, holders
from qsim_kernels import lowered

FORMATS = [*NAMED, *VARIETY]
SETTINGS = [(rounding, overflow) for rounding in oracle.DETERMINISTIC for overflow in oracle.OVERFLOWS]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operators(call: Callable[..., Any], *given: Tensor) -> list[str]:
    """The operators of the graphs that a compiler gets of a call, forward and backward."""
    found: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    result = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))(*given)
    if result.requires_grad:
        result.sum().backward()
    return found


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_gives_the_operators_bits(fmt: Format, dtype: torch.dtype) -> None:
    own = (torch.bfloat16, torch.float16)
    x = inputs.every_pattern(dtype) if dtype in own else torch.cat([inputs.edges(fmt, dtype, count=400), inputs.specials(dtype)])
    x = torch.cat([x, inputs.nans(dtype)])
    target = next(held for held in (dtype, *reversed(holders(fmt))) if held in holders(fmt))
    for rounding, overflow in dealt(SETTINGS, FORMATS.index(fmt) + inputs.DTYPES.index(dtype), 2):
        how = qsim.rounding.resolve(rounding).spelling[overflow]
        found = lowered.rounding.quantize(x, None, fmt.spelling[0], how, 0, 0, target)
        assert found is not None
        assert same_bits(found, qsim.quantize(x, fmt, rounding, overflow=overflow, dtype=target)), (rounding, overflow, target)


def test_graphs_hold_plain_operators(device: torch.device) -> None:
    x = torch.randn(8, 8, device=device)
    assert not any("qsim" in name for name in operators(lambda x: qsim.quantize(x, "e4m3", "up"), x))
    assert any("qsim.quantize" in name for name in operators(lambda x: qsim.quantize(x, "e4m3", "stochastic", seed=1), x))


def test_layers_hold_plain_operators(device: torch.device) -> None:
    points = qsim.FivePoint("e4m3", "e4m3", "e3m2", "e3m2", "e5m2")
    layer = qsim.convert(nn.Linear(4, 3, device=device), points)
    assert not any("qsim" in name for name in operators(layer, torch.randn(2, 4, device=device, requires_grad=True)))


def test_exported_programs_keep_the_operator() -> None:
    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return qsim.quantize(x, "e4m3")

    program = torch.export.export(Rounds(), (torch.randn(3),))
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"] == ["qsim.quantize.default"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_inductor_gives_the_operators_bits(dtype: torch.dtype, device: torch.device) -> None:
    # E8M0 has no zero and no sign: C++ that may take a NaN's pattern for one that never overflows loses it there.
    formats = [fmt for fmt in (E8M0, E4M3, E2M1, E5M2, Fixed(8, 4, signed=False), Int(8)) if dtype in holders(fmt)]
    # A C++ compiler takes its time.
    hands = 8 if dtype in (torch.float32, torch.bfloat16) else len(SETTINGS)
    chosen = [(fmt, *setting) for turn, fmt in enumerate(formats) for setting in dealt(SETTINGS, turn + inputs.DTYPES.index(dtype), hands)]

    def call(x: Tensor) -> list[Tensor]:
        return [qsim.quantize(x, fmt, rounding, overflow=overflow) for fmt, rounding, overflow in chosen]

    x = torch.cat([inputs.random_patterns(dtype, 5000, 0), inputs.specials(dtype), inputs.nans(dtype)]).to(device)
    for setting, found, due in zip(chosen, torch.compile(call, fullgraph=True)(x), call(x), strict=True):
        assert same_bits(found, due), setting


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_fused_rounds_first(dtype: torch.dtype, device: torch.device) -> None:
    """A product is a number of its dtype before it is rounded to a format, and a rounded number is one before anything is added to it.

    Fused code could keep 16-bit products in float32, and contract a product or a rounded number with what is added next.
    """
    a, b, c = (torch.randn(1 << 14, device=device).to(dtype) for _ in range(3))

    def call(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return qsim.quantize(a * b, "e4m3"), qsim.quantize(a * b, "e2m1", "odd") + c

    for found, due in zip(torch.compile(call, fullgraph=True)(a, b, c), call(a, b, c), strict=True):
        assert same_bits(found, due)


@pytest.mark.slow
def test_ties_that_a_contraction_would_break(device: torch.device) -> None:
    # 1.0625 lies between 1 and 1.125, and a product a little above it is that in float32: even, so down. With all of its bits, up.
    a = torch.arange(2**23, 2**23 + 20_000, device=device) * 2.0**-23
    b = (1.0625 / a.double()).float()
    above = (a.double() * b.double() > 1.0625) & (a * b == 1.0625)
    assert above.sum() > 100
    a, b = a[above], b[above]
    assert (torch.compile(lambda a, b: qsim.quantize(a * b, "e4m3"), fullgraph=True)(a, b) == 1).all()
