"""qsim.nn.MultiheadAttention compared with torch's, and torch's transformer layers with quantized layers in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from support.comparing import same_bits
from support.points import in_order

WIDE = in_order(*["fp32"] * 5)
NEAREST = FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2")
WIDTH, HEADS = 8, 2

#: Module arguments, and the widths of keys and values.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "bias_kv and zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "own widths": {"kdim": 4, "vdim": 6},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, points: FivePoint | None) -> nn.MultiheadAttention:
    """A module, torch's own if points are `None`; all with the same weights."""
    torch.manual_seed(3)
    if points is None:
        return nn.MultiheadAttention(WIDTH, HEADS, **KINDS[kind])
    return qsim.nn.MultiheadAttention(WIDTH, HEADS, **KINDS[kind], points=points)


def inputs(kind: str, same: str = "") -> list[Tensor]:
    """Query, key and value, some of which may be the same tensor."""
    options = KINDS[kind]
    lengths = (5, 5, 5) if same else (4, 5, 5)
    widths = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    shapes = [
        (3, length, width) if options.get("batch_first") else (length, 3, width) for length, width in zip(lengths, widths, strict=True)
    ]
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return {"": [query, key, value], "key and value": [query, key, key], "all": [query, query, query]}[same]


def hiding(rows: int, columns: int) -> Tensor:
    """A boolean mask that leaves something visible in each row."""
    return (torch.arange(rows)[:, None] + torch.arange(columns)) % 3 == 1


def masks(queries: int, keys: int = 5) -> dict[str, dict[str, Tensor]]:
    """Mask arguments."""
    return {
        "none": {},
        "boolean": {"attn_mask": hiding(queries, keys)},
        "float": {"attn_mask": torch.linspace(-2, 2, queries * keys).view(queries, keys)},
        "of every head": {"attn_mask": torch.linspace(-2, 2, 6 * queries * keys).view(6, queries, keys)},
        "padding": {"key_padding_mask": hiding(3, keys)},
        "both": {"attn_mask": hiding(queries, keys).roll(1, 1) & hiding(queries, keys), "key_padding_mask": hiding(3, keys)},
    }


def run(module: nn.Module, given: list[Tensor], **options: Any) -> list[Tensor]:
    """The module's output, and the gradients of its inputs and parameters."""
    values = [value for value in module(*given, **options) if value is not None]
    total = torch.stack([(value * torch.linspace(-1, 1, value.numel()).view(value.shape)).sum() for value in values]).sum()
    leaves = [*{id(x): x for x in given}.values(), *module.parameters()]
    return [*(value.detach() for value in values), *torch.autograd.grad(total, leaves)]


@kinds
@pytest.mark.parametrize("need_weights", [True, False])
def test_without_points_it_is_torchs_bit_for_bit(kind: str, need_weights: bool) -> None:
    given = inputs(kind)
    own, torchs = (run(made(kind, points), given, need_weights=need_weights) for points in (FivePoint(), None))
    assert all(map(same_bits, own, torchs))


@pytest.mark.sampled(3)
@kinds
@pytest.mark.parametrize("mask", masks(1))
@pytest.mark.parametrize("need_weights", [True, False])
def test_with_wide_points_it_is_torchs(kind: str, mask: str, need_weights: bool) -> None:
    given, options = inputs(kind), {"need_weights": need_weights, **masks(4)[mask]}
    own, torchs = (run(made(kind, points), given, **options) for points in (WIDE, None))
    for a, b in zip(own, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "batch first"])
@pytest.mark.parametrize("options", [{"average_attn_weights": False}, {"need_weights": False, "is_causal": True}], ids=str)
def test_other_options_are_torchs(kind: str, options: dict[str, Any]) -> None:
    given = inputs(kind, "all")
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    own, torchs = (run(made(kind, points), given, attn_mask=mask, **options) for points in (WIDE, None))
    for a, b in zip(own, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", [True, False])
def test_without_a_batch_it_is_torchs(average: bool) -> None:
    given = [x[0] for x in inputs("batch first")]
    options = {"key_padding_mask": hiding(3, 5)[1], "attn_mask": hiding(4, 5), "average_attn_weights": average}
    own, torchs = (made("plain", points)(*given, **options) for points in (WIDE, None))
    for a, b in zip(own, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_query_that_may_look_at_nothing() -> None:
    given, mask = inputs("batch first"), torch.zeros(3, 5, dtype=torch.bool)
    mask[1] = True
    for need_weights in (True, False):
        own, torchs = (made("batch first", points)(*given, key_padding_mask=mask, need_weights=need_weights)[0] for points in (WIDE, None))
        torch.testing.assert_close(own, torchs, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert bool(own[1].isnan().all()) == need_weights


def straight_through(module: nn.MultiheadAttention, given: list[Tensor]) -> list[Tensor]:
    """Attention written out: with points that reuse the forward's tensors, the gradient is the rounded function's, straight through."""

    def rounded(x: Tensor) -> Tensor:
        return qsim.quantize(x, "e4m3")

    assert module.in_proj_bias is not None
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    q, k, v = (F.linear(rounded(x), rounded(w), b) for x, w, b in zip(given, weights, biases, strict=True))
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    scores = (rounded(q / (WIDTH // HEADS) ** 0.5) @ rounded(k).mT).softmax(-1)
    mixed = (rounded(scores) @ rounded(v)).transpose(1, 2).flatten(2)
    return [F.linear(rounded(mixed), rounded(module.out_proj.weight), module.out_proj.bias), scores.mean(1)]


@pytest.mark.parametrize("same", ["", "key and value", "all"])
def test_rounds_what_goes_into_each_product(same: str) -> None:
    points = FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same")
    given, module = inputs("batch first", same), made("batch first", points)
    own = run(module, given)
    assert not torch.allclose(own[0], made("batch first", None)(*given)[0], rtol=1e-3)

    class WrittenOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *given: Tensor) -> list[Tensor]:
            return straight_through(self.inner, list(given))

    for a, b in zip(own, run(WrittenOut(), given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_autocast_and_checkpoints() -> None:
    given, module = inputs("batch first", "all"), made("batch first", in_order(*[Quantizer("e4m3", "stochastic")] * 5))
    expected = run(Seeded(module), given)
    assert all(map(same_bits, run(Seeded(lambda *x: checkpoint(module, *x, use_reentrant=False), module), given), expected))
    with torch.autocast("cpu", torch.bfloat16):
        value, weights = made("batch first", NEAREST)(*given)
        native = made("batch first", None)(*given)[0]
    assert value.dtype == native.dtype == torch.bfloat16
    exact = made("batch first", NEAREST)(*given)[0]
    off, far = ((other.float() - exact).norm() / exact.norm() for other in (value, native))
    assert 1.5 * off < far, f"{off}, {far}: closer to the same points in float32 than to no points in bfloat16"
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(3, 5), rtol=0, atol=0.02)


class Seeded(nn.Module):
    """A call with the same noise every time."""

    def __init__(self, call: Callable[..., Any], parameters: nn.Module | None = None) -> None:
        super().__init__()
        self.call = call
        self.held = parameters

    def forward(self, *given: Tensor) -> Any:
        torch.manual_seed(9)
        return self.call(*given)


# In evaluation torch's layers use a fast path that reads weights without calling layers: points still apply.


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layers(training: bool, norm_first: bool) -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=True, norm_first=norm_first).train(training)
    encoder = qsim.convert(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first), NEAREST).train(training)
    x, padding = torch.randn(3, 5, WIDTH), torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 5])

    def written_out(x: Tensor, block: Any) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return block.self_attn(x, x, x, key_padding_mask=padding, need_weights=False)[0]  # type: ignore[no-any-return]

        def feed(x: Tensor) -> Tensor:
            inner = functional.linear(x, block.linear1.weight, block.linear1.bias, NEAREST).relu()
            return functional.linear(inner, block.linear2.weight, block.linear2.bias, NEAREST)

        if norm_first:
            x = x + attend(block.norm1(x))
            return x + feed(block.norm2(x))
        x = block.norm1(x + attend(x))
        return block.norm2(x + feed(x))  # type: ignore[no-any-return]

    with torch.set_grad_enabled(training):
        found = encoder(x, src_key_padding_mask=padding)
        expected = x
        for block in encoder.layers:
            expected = written_out(expected, block)
    assert same_bits(found, expected)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_whole_transformer(training: bool) -> None:
    torch.manual_seed(1)
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 12, dropout=0.0, batch_first=True).train(training)
    native = copy.deepcopy(model)
    changed = qsim.nn.conversion(qsim.convert(model, WIDE)).changed
    kinds = [kind for _, kind, _ in changed]
    assert (kinds.count("MultiheadAttention"), kinds.count("Linear")) == (3, 4)
    source, goal = torch.randn(2, 4, WIDTH), torch.randn(2, 3, WIDTH)
    with torch.set_grad_enabled(training):
        causal = nn.Transformer.generate_square_subsequent_mask(3)
        values = [net(source, goal, tgt_mask=causal, tgt_is_causal=True) for net in (model, native)]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
        narrow = qsim.convert(model, NEAREST)(source, goal)
    assert not torch.allclose(narrow, values[1], rtol=1e-3)
    reverted = qsim.revert(model)
    with torch.set_grad_enabled(training):
        assert same_bits(reverted(source, goal), native(source, goal))


class Derived(nn.MultiheadAttention):
    """Torch's attention under another name."""


class Forwarding(nn.MultiheadAttention):
    """Torch's attention with a forward of its own."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return super().forward(*inputs, **options)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "boolean": {"attn_mask": torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)},
    "causal": {"attn_mask": torch.triu(torch.ones(5, 5, dtype=torch.bool), 1), "is_causal": True},
    "padding": {"key_padding_mask": torch.arange(5) >= torch.tensor([[4], [5], [5]])},
}


def attended(kind: type[nn.MultiheadAttention], points: FivePoint, options: Any, mask: str, need_weights: bool) -> list[Tensor]:
    """The results and gradients of a converted module."""
    torch.manual_seed(0)
    model = qsim.convert(nn.ModuleList([kind(16, 2, **options)]), points)
    shape = (3, 5) if "batch_first" in options else (5, 3)
    x = torch.randn(*shape, 16, requires_grad=True)
    key, value = (torch.randn(*shape, options[name]) if name in options else x for name in ("kdim", "vdim"))
    result, weights = model[0](x, key, value, need_weights=need_weights, **MASKS[mask])
    result.square().sum().backward()
    return [result, x.grad, model[0].out_proj.weight.grad, *([weights] if need_weights else [])]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"kdim": 12, "vdim": 10}, {"add_bias_kv": True}], ids=str)
def test_derived_classes_and_the_function_round_alike(options: Any, mask: str, need_weights: bool) -> None:
    if "add_bias_kv" in options and mask == "causal":
        return  # torch itself hides the added keys only without need_weights
    for points in (NEAREST, qsim.recipes.mxfp8().points):
        own = attended(nn.MultiheadAttention, points, options, mask, need_weights)
        for kind in (Derived, Forwarding):
            assert all(map(same_bits, attended(kind, points, options, mask, need_weights), own)), kind


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", ["fp8_hybrid", "fp8_blockwise", "hfp8", "mxfp8", "mxfp6", "int8 nearest", "act only"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_class_and_its_subclass_give_the_same_bits(recipe: str, need_weights: bool) -> None:
    own = {"int8 nearest": FivePoint("int8", "int8", "int8"), "act only": FivePoint(act="e2m1", act_bwd=None)}
    points = own.get(recipe) or qsim.recipes.resolve(recipe).points
    for key in (None, torch.randn(3, 9, 32)):
        results = []
        for cls in (nn.MultiheadAttention, Derived):
            torch.manual_seed(1)
            module = qsim.convert(cls(32, 4, batch_first=True), points)
            x = torch.randn(3, 7, 32, requires_grad=True)
            y = module(x, x if key is None else key, x if key is None else key, need_weights=need_weights)[0]
            results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])])
        assert all(map(torch.equal, *results))
