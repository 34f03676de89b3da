"""Small tensors as lowered for compilers: rounded where their scale is computed, with random bits that each element draws by itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.ops_handler import MockHandler
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

import qsim
from qsim.formats import E2M1, E4M3, E5M2, E8M0
from qsim.functional.arguments import spelling
from qsim.random import Noise
from qsim_kernels import lowered
from qsim_kernels.lowered import rounding as lowered_rounding
from qsim_kernels.meanings.inductor import LoopElement
from support import inputs
from support.comparing import same_bits
from support.compilers import operators

pytestmark = pytest.mark.usefixtures("fresh_compiler")


PLACES = [("place", torch.int64), ("seed", torch.int64)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors count as such on every device."""
    monkeypatch.setattr(lowered.sizes, "is_small", lambda x: x.numel() <= 2**16)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_small_tensors_are_rounded_where_their_scale_is_computed(device: torch.device) -> None:
    layer = qsim.convert(nn.Linear(128, 128, device=device), "fp8_hybrid").requires_grad_(False)
    x = torch.randn(64, 128, device=device)
    found, (source,) = run_and_get_code(torch.compile(layer), x)
    assert torch.equal(found, layer(x))
    loops = re.findall(r"^ +((?:triton|cpp)_\w*amax\w*)", source, re.M)
    assert any("quantize_scaled" in name for name in loops)
    assert len(loops) <= 2, "no other loop goes through the partial results of one"


X = torch.randn(40, generator=torch.Generator().manual_seed(3))


@pytest.mark.usefixtures("small")
def test_a_piece_of_a_tensor_draws_the_bits_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered_rounding.inductor, "generates", lambda device: True)
    spelt, seed = spelling("e2m1", "stochastic", "saturate"), torch.tensor(7)
    for start in (0, 2, 19):
        found = lowered_rounding.quantize(X[start:], seed, spelt.grid, spelt.rule, 5, start, torch.float32)
        assert found is not None
        assert same_bits(found, qsim.quantize(X, "e2m1", "stochastic", seed=Noise(7, stream=5))[start:])


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_compiled_code_draws_the_bits_of_a_place(device: torch.device) -> None:
    x = X.to(device)
    found, (source,) = run_and_get_code(torch.compile(lambda x: qsim.quantize(x[2:], "e2m1", "stochastic", seed=Noise(0, offset=2))), x)
    assert same_bits(found, qsim.quantize(x, "e2m1", "stochastic", seed=0)[2:])
    assert "qsim.quantize.default" not in source


def is_one_kernel(source: str, device: torch.device) -> bool:
    """Whether code that Inductor generated has a single loop and calls no operator's implementation."""
    return len(re.findall(r"^ +(?:triton|cpp)_\w+(?:\.run)?\(", source, re.M)) == 1 and f"qsim_{device.type}_" not in source


@pytest.mark.parametrize(
    "rounding", ["nearest", "up", "odd", "stochastic", qsim.Stochastic(bits=7), qsim.Stochastic(bits=3, correction=True)]
)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e8m0", "int8"])
def test_loops_of_every_rounding_are_written(fmt: str, rounding: str | qsim.Stochastic) -> None:
    """As text: compiling them is left to slow tests."""
    spelt = spelling(fmt, rounding, "saturate")
    x: Any = LoopElement("x", torch.bfloat16)
    where, seed = (LoopElement(name, torch.int64) if spelt.is_stochastic else None for name in ("place", "seed"))
    with V.set_ops_handler(MockHandler()):
        found: Any = lowered_rounding.onto(x, where, seed, 7, spelt.grid, spelt.rule, torch.float32)
    assert found.dtype == torch.float32
    assert ("place" in str(found.value)) == spelt.is_stochastic


@pytest.mark.parametrize(("bits", "drawn"), [(16, 1), (17, 2)])
def test_loops_on_a_gpu_draw_by_one_operation(bits: int, drawn: int) -> None:
    """Inductor's own would be hundreds, which it reads many times."""
    spelt = spelling("e4m3", qsim.Stochastic(bits=bits), "saturate")
    x, where, seed = (LoopElement(name, dtype, torch.device("cuda")) for name, dtype in (("x", torch.bfloat16), *PLACES))
    with V.set_ops_handler(MockHandler()):
        found: Any = lowered_rounding.onto(x, where, seed, 7, spelt.grid, spelt.rule, torch.float32)  # type: ignore[arg-type]
    (text,) = set(re.findall(r"\{\.reg .*?\bcvt\.u64\.u32 \$0, bits;\}", str(found.value)))
    assert text.count("_ROUND:") == drawn
    assert "bitwise_xor" not in str(found.value)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_tensors_draw_random_bits_in_loops(dtype: torch.dtype, device: torch.device) -> None:
    """Formats of every kind, and as many random bits as decide in the first block, need a second, and have a correction."""
    roundings = [qsim.Stochastic(), qsim.Stochastic(bits=7), qsim.Stochastic(bits=16), qsim.Stochastic(bits=3, correction=True)]
    settings = list(zip((E4M3, E2M1, E8M0, E5M2), roundings, strict=True))

    def call(x: Tensor, seed: Tensor) -> list[Tensor]:
        return [qsim.quantize(x, fmt, rounding, overflow="saturate", seed=seed) for fmt, rounding in settings]

    x = torch.cat([inputs.random_patterns(dtype, 4003, 0), inputs.specials(dtype), E4M3.smallest * torch.rand(999).to(dtype)]).to(device)
    seed = torch.tensor(-(2**63) + 12345, device=device)
    found, (source,) = run_and_get_code(torch.compile(call, fullgraph=True), x, seed)
    assert is_one_kernel(source, device)
    for setting, a, b in zip(settings, found, call(x, seed), strict=True):
        assert same_bits(a, b), setting


def test_operators_that_draw_for_each_element_give_the_same_bits_outside_of_loops() -> None:
    x, seed = torch.randn(3, 40), torch.tensor(3)
    where = torch.arange(7, 127).view(x.shape)
    spelt = qsim.Quantizer("e2m1", "stochastic").spelt
    found = torch.ops.qsim.quantize_fused.default(x, where, seed, 5, spelt.grid, spelt.rule, x.dtype)
    assert same_bits(found, qsim.quantize(x, "e2m1", "stochastic", seed=qsim.random.Noise(seed, 5, 7)))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_small_tensors_draw_random_bits_under_their_scales(device: torch.device) -> None:
    scales = ("e4m3", qsim.scaling.PerTensor()), ("e2m1", qsim.scaling.PerBlock(16, dim=0))
    points = [qsim.Quantizer(fmt, "stochastic", scale=scale) for fmt, scale in scales]

    def call(x: Tensor, seed: Tensor) -> list[Tensor]:
        return [point(x, seed=seed) for point in points]

    x, seed = torch.randn(32, 48, device=device), torch.tensor(5, device=device)
    found, (source,) = run_and_get_code(torch.compile(call, fullgraph=True), x, seed)
    assert f"qsim_{device.type}_" not in source
    assert all(map(same_bits, found, call(x, seed)))


@pytest.mark.usefixtures("small")
def test_layers_round_small_weights_once() -> None:
    found = operators(qsim.convert(nn.Linear(64, 32), "fp8_hybrid"), torch.randn(2, 64, requires_grad=True))
    assert "qsim.again.default" not in found
