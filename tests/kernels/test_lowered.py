"""Rounding as lowered for compilers: one node per rounding, with the operator's bits, however it is fused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import count, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import qsim
from qsim.formats import E2M1, E4M3, E5M2, E8M0, Fixed, Format, Int, holders
from qsim.nn.product.sites import Site
from qsim_kernels import lowered
from support import compilers, inputs, oracle, scaled_settings
from support.catalogue import NAMED, VARIETY
from support.comparing import same_bits
from support.compilers import operators
from support.covering import dealt

pytestmark = pytest.mark.usefixtures("fresh_compiler")

FORMATS = [*NAMED, *VARIETY]
SETTINGS = [(rounding, overflow) for rounding in oracle.DETERMINISTIC for overflow in oracle.OVERFLOWS]


@pytest.mark.sampled(12)
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


def test_this_release_of_torch_is_tested(device: torch.device) -> None:
    """If this fails in a new release, add it to `TESTED` and run this file; without it, compiling takes longer."""
    assert torch.__version__.startswith(lowered.inductor.TESTED[device.type])


def rounds(x: Tensor) -> Tensor:
    return qsim.quantize(x, "e4m3", "up")


def test_graphs_hold_one_node_per_rounding(device: torch.device) -> None:
    x = torch.randn(8, 8, device=device)
    assert operators(rounds, x) == ["qsim.quantize_fused.default"]
    assert "qsim.quantize.default" in operators(lambda x: qsim.quantize(x, "e4m3", "stochastic", seed=1), x)


def test_compiled_code_calls_implementations_directly(device: torch.device) -> None:
    """Compiled code draws the same random bits without the dispatcher."""

    def call(x: Tensor, seed: Tensor) -> Tensor:
        return qsim.quantize(x, "e4m3", "stochastic", seed=seed)

    given = torch.randn(512, 512, device=device), torch.tensor(1, device=device)
    found, (source,) = run_and_get_code(torch.compile(call, fullgraph=True), *given)
    assert f"= qsim_{device.type}_quantize(" in source
    assert torch.equal(found, call(*given))


@pytest.mark.slow
def test_layers_hold_one_node_per_rounding() -> None:
    points = qsim.FivePoint("e4m3", "e4m3", act_bwd="e3m2", weight_bwd="e3m2", grad="e5m2")
    found = operators(qsim.convert(nn.Linear(4, 3), points), torch.randn(2, 4, requires_grad=True))
    assert Counter(name for name in found if "qsim" in name) == {
        "qsim.again.default": 1,
        "qsim.quantize_fused.default": 5,
        "qsim.in_memory.default": 1,
    }


def test_layers_under_scales_hold_few_nodes() -> None:
    found = operators(qsim.convert(nn.Linear(64, 32), "fp8_hybrid"), torch.randn(2, 64, requires_grad=True))
    # Three tensors are rounded. The backward pass rounds the weight again instead of keeping it, and so, on torch 2.15, it does the input.
    rounded = 5 if torch.__version__.startswith("2.15.") else 4
    assert Counter(name for name in found if "qsim" in name) == {
        "qsim.again.default": 1,
        "qsim.magnitudes_fused.default": 3,
        "qsim.scales_fused.default": 3,
        "qsim.inverses_fused.default": rounded,
        "qsim.quantize_scaled_fused.default": rounded,
        "qsim.rescaled_fused.default": 3,
    }


@pytest.mark.gpu
def test_large_weights_are_rounded_by_kernels_of_their_own() -> None:
    layer = qsim.convert(nn.Linear(1024, 1024, device="cuda"), "fp8_hybrid")
    found = Counter(operators(layer, torch.randn(64, 1024, device="cuda", requires_grad=True)))
    assert (found["qsim.scales_of_tiles.default"], found["qsim.quantize_scaled.default"]) == (1, 2)
    assert (found["qsim.magnitudes_fused.default"], found["qsim.quantize_scaled_fused.default"]) == (2, 2)


@pytest.mark.parametrize("is_faster", [False, True])
def test_gradients_in_blocks_are_rounded_by_one_operator_where_loops_do_not(is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered.scaling, "_is_rounded_in_loops", lambda *_: not is_faster)
    layer, x = qsim.convert(nn.Linear(64, 32), "mxfp8"), torch.randn(32, 64)
    found = Counter(operators(layer, x.requires_grad_()))
    expected = (4, 1, 0) if is_faster else (0, 0, 6)
    names = "quantize_tiles", "quantize_both_ways", "quantize_scaled_fused"
    assert tuple(found[f"qsim.{name}.default"] for name in names) == expected


@pytest.mark.gpu
def test_compiled_layers_call_the_operator_that_rounds_large_gradients_both_ways() -> None:
    layer = qsim.convert(nn.Linear(64, 1024, bias=False, device="cuda", dtype=torch.bfloat16), "mxfp8")
    # Integers, so that the order of sums does not matter.
    x, g, w = (torch.randint(-8, 9, (1024, size), device="cuda").bfloat16() for size in (64, 1024, 64))
    layer.weight.data.copy_(w)
    x.requires_grad_()
    assert Counter(operators(layer, x))["qsim.quantize_both_ways.default"] == 1
    found = [torch.autograd.grad(call(x), [x, *layer.parameters()], g) for call in (torch.compile(layer), layer)]
    assert all(map(torch.equal, *found))


def layer_that_looks_ahead(device: str, columns: int) -> tuple[nn.Module, Tensor]:
    """A layer whose inputs and gradients are rounded again after a transform, and an input of 1024 rows."""
    layer = qsim.nn.Linear(1024, columns, bias=False, points=qsim.recipes.nvfp4().points, device=device, dtype=torch.bfloat16)
    return layer, torch.randn(1024, 1024, device=device).bfloat16().requires_grad_()


def test_scales_of_transforms_are_found_in_graphs_without_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "looks_ahead", lambda *_: True)
    found = Counter(operators(*layer_that_looks_ahead("cpu", 64)))
    # No scale of a whole transformed tensor is left: those of parts are lowered.
    assert (found["qsim.quantize_tiles_and_amaxes.default"], found["qsim.scales_of_tiles.default"]) == (2, 0)


@pytest.mark.gpu
def test_compiled_layers_find_scales_of_transforms_of_large_tensors_without_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_that_looks_ahead("cuda", 2080)
    g, found = torch.randn(1024, 2080, device="cuda").bfloat16(), []
    assert Counter(operators(layer, x))["qsim.quantize_tiles_and_amaxes.default"] == 2
    for patch in ({}, {"looks_ahead": lambda *_: False}):
        for name, function in patch.items():
            monkeypatch.setattr(Site, name, function)
        torch.compiler.reset()
        torch.manual_seed(3)
        found.append(torch.autograd.grad(torch.compile(layer)(x), [x, *layer.parameters()], g))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_what_is_read_for_a_scale_and_to_be_rounded_is_computed_once(device: torch.device) -> None:
    layer = qsim.convert(nn.Linear(512, 512, device=device), "fp8_hybrid").requires_grad_(False)
    _, (source,) = run_and_get_code(torch.compile(lambda x: layer(x.ceil())), torch.randn(64, 512, device=device))
    assert source.count("ceil(") == 1


@pytest.mark.slow
def test_what_two_operators_read_is_written_once(device: torch.device) -> None:
    def call(x: Tensor) -> list[Tensor]:
        rows = x.ceil().flatten(0, 1)
        return [qsim.quantize(rows, fmt, "stochastic", seed=1) for fmt in ("e4m3", "e3m2")]

    x = torch.randn(2, 64, 64, device=device)
    found, (source,) = run_and_get_code(torch.compile(call), x)
    read = re.findall(r"= qsim_\w+_quantize\((?:reinterpret_tensor\()?(buf\d+)", source)
    assert read == [read[0]] * 2
    assert all(map(torch.equal, found, call(x)))


@pytest.mark.gpu
def test_products_get_the_scales_of_both_operands_as_one_number() -> None:
    layer = qsim.convert(nn.Linear(64, 32, device="cuda", dtype=torch.bfloat16), "fp8_hybrid")
    found = Counter(operators(layer, torch.randn(16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)))
    assert (found["qsim.matmul_rescaled.default"], found["aten.mul.Tensor"]) == (3, 3)


def holds_plain_operators(device: torch.device, compiler: Callable[..., Any] = compilers.inductor) -> bool:
    """Whether a layer's graphs hold torch's own operators in place of those that fuse."""
    layer = qsim.convert(nn.Linear(64, 32, device=device), "fp8_hybrid")
    found = operators(layer, torch.randn(2, 64, device=device, requires_grad=True), compiler=compiler)
    return "aten.amax.default" in found and not any(name.endswith("_fused.default") for name in found)


def test_other_compilers_get_plain_operators(device: torch.device) -> None:
    assert holds_plain_operators(device, compilers.another)


@pytest.mark.slow
def test_other_releases_of_torch_get_plain_operators(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lowered.inductor.TESTED, device.type, ("1.0.",))
    assert holds_plain_operators(device)


def test_exported_programs_keep_the_operator() -> None:
    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return qsim.quantize(x, "e4m3")

    program = torch.export.export(Rounds(), (torch.randn(3),))
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"] == ["qsim.quantize.default"]


def settings(dtype: torch.dtype) -> list[tuple[Format, str, str]]:
    """Formats that a dtype holds, with some roundings and overflow modes of each."""
    # E8M0 has no zero and no sign: C++ that never overflows on a NaN's pattern would lose NaN there.
    formats = [fmt for fmt in (E8M0, E4M3, E2M1, E5M2, Fixed(8, 4, signed=False), Int(8)) if dtype in holders(fmt)]
    # A C++ compiler takes a second for each: every format has one setting in each dtype, and three dtypes together have all settings.
    first = 6 * inputs.DTYPES.index(dtype)
    return [(fmt, *setting) for turn, fmt in enumerate(formats, first) for setting in dealt(SETTINGS, turn, len(SETTINGS))]


@pytest.mark.slow
def test_inductor_gives_the_operators_bits(device: torch.device) -> None:
    chosen = {dtype: settings(dtype) for dtype in inputs.DTYPES}

    def call(given: dict[torch.dtype, Tensor]) -> list[list[Tensor]]:
        return [
            [qsim.quantize(given[dtype], fmt, rounding, overflow=overflow) for fmt, rounding, overflow in own]
            for dtype, own in chosen.items()
        ]

    given = {
        dtype: torch.cat([inputs.random_patterns(dtype, 5000, 0), inputs.specials(dtype), inputs.nans(dtype)]).to(device)
        for dtype in inputs.DTYPES
    }
    for (dtype, own), found, due in zip(chosen.items(), torch.compile(call, fullgraph=True)(given), call(given), strict=True):
        for setting, a, b in zip(own, found, due, strict=True):
            assert same_bits(a, b), (dtype, setting)


@pytest.mark.slow
def test_loops_have_every_rounding(device: torch.device) -> None:
    """Formats with and without subnormals, with and without zero: their arithmetic begins with numbers or with elements."""
    # Each format has every rounding, in turn with either overflow mode.
    chosen = [
        (fmt, rounding, oracle.OVERFLOWS[(turn + other) % 2])
        for turn, fmt in enumerate((E8M0, E4M3, Fixed(8, 4), E2M1))
        for other, rounding in enumerate(oracle.DETERMINISTIC)
    ]

    def call(x: Tensor) -> list[Tensor]:
        return [qsim.quantize(x, fmt, rounding, overflow=overflow) for fmt, rounding, overflow in chosen]

    x = torch.cat([inputs.random_patterns(torch.float32, 1000, 0), inputs.specials(torch.float32)]).to(device)
    for setting, found, due in zip(chosen, torch.compile(call, fullgraph=True)(x), call(x), strict=True):
        assert same_bits(found, due), setting


@pytest.mark.slow
def test_fused_operations_round_first(device: torch.device) -> None:
    """A product is rounded to its dtype before it is rounded to a format, and a rounded number is final before anything is added to it.

    Fused code could keep 16-bit products in float32, and contract a product or a rounded number with what is added next.
    """
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    given = [[torch.randn(1 << 14, device=device).to(dtype) for _ in range(3)] for dtype in dtypes]

    def call(given: list[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
        return [(qsim.quantize(a * b, "e4m3"), qsim.quantize(a * b, "e2m1", "odd") + c) for a, b, c in given]

    for dtype, found, due in zip(dtypes, torch.compile(call, fullgraph=True)(given), call(given), strict=True):
        assert all(map(same_bits, found, due)), dtype


@pytest.mark.slow
def test_ties_that_a_contraction_would_break(device: torch.device) -> None:
    # 1.0625 is between 1 and 1.125, and a slightly larger product equals it in float32: even, so down. With all of its bits, up.
    a = torch.arange(2**23, 2**23 + 20_000, device=device) * 2.0**-23
    b = (1.0625 / a.double()).float()
    above = (a.double() * b.double() > 1.0625) & (a * b == 1.0625)
    assert above.sum() > 100
    a, b = a[above], b[above]
    assert (torch.compile(lambda a, b: qsim.quantize(a * b, "e4m3"), fullgraph=True)(a, b) == 1).all()


class LoweredScaling:
    """The lowered operators with scales: plain torch if they have a decomposition, otherwise the reference."""

    def __init__(self) -> None:
        self.lowered = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            found = getattr(lowered.scaling, name)(*given)
            self.lowered += found is not None
            return getattr(scaled_settings.REFERENCE, name)(*given) if found is None else found

        return call


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_gives_the_operators_bits_under_scales(first: int, device: torch.device) -> None:
    scaling: Any = LoweredScaling()
    for number in range(first, first + 50):
        scaled_settings.check(scaling, device, scaled_settings.setting(number, scaled_settings.LARGE))
    assert scaling.lowered >= 50


@pytest.mark.slow
def test_inductor_gives_the_operators_bits_under_scales(device: torch.device) -> None:
    settings = (scaled_settings.setting(number, scaled_settings.LARGE) for number in count())
    plain = (how for how in settings if not how.turn and not how.spelt.is_stochastic)
    # Operators that are not lowered would only divide the generated code into parts, and a C++ compiler takes a second for each.
    chosen = list(islice((how for how in plain if lowered.scaling.amaxes(how.x, how.tiles, (), False) is not None), 6))

    def call(*given: Tensor) -> list[tuple[Tensor, ...]]:
        found: list[tuple[Tensor, ...]] = []
        for turn, (how, x) in enumerate(zip(chosen, given, strict=True)):
            if turn % 2:  # the same in one operator: each setting takes one of the two ways, for what is generated costs a second
                found.append(torch.ops.qsim.quantize_tiles(x, None, how.tiles, (), *how.making, *how.rounding))
                continue
            amaxes = torch.ops.qsim.amaxes(x, how.tiles, (), False)
            scales = torch.ops.qsim.scales(amaxes, None, *how.making)
            found.append((amaxes, scales, torch.ops.qsim.quantize_scaled(x, scales, None, how.tiles, (), *how.rounding)))
        return found

    due = call(*(how.x for how in chosen))
    found = torch.compile(call, fullgraph=True)(*(how.x.to(device) for how in chosen))
    for how, one, other in zip(chosen, found, due, strict=True):
        assert all(scaled_settings.equal(how.x, a, b) for a, b in zip(one, other, strict=True)), how


@pytest.mark.slow
def test_a_product_is_rounded_before_it_meets_its_bias_and_what_follows(device: torch.device) -> None:
    """Fused code could contract the product with the bias, and keep a 16-bit result in float32 for what is added next."""
    product, bias, later = (torch.randn(shape, device=device) for shape in ((64, 256), (256,), (64, 256)))
    factors = [torch.rand((), device=device), torch.rand(64, 1, device=device)]

    def call(product: Tensor, bias: Tensor, later: Tensor) -> list[Tensor]:
        return [torch.ops.qsim.rescaled(product, factors, bias, dtype) + later for dtype in (torch.float32, torch.bfloat16)]

    assert all(map(same_bits, torch.compile(call, fullgraph=True)(product, bias, later), call(product, bias, later)))


def test_caches_of_compiled_code_tell_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def tag() -> str:
        with torch.compiler.config.patch(cache_key_tag="mine"):
            lowered.inductor.mark_caches()
            return torch.compiler.config.cache_key_tag

    ours = tag()
    assert ours.startswith("mine qsim ")
    assert ours.removeprefix("mine ") in torch.compiler.config.cache_key_tag
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: b"another version")
    assert tag() != ours
