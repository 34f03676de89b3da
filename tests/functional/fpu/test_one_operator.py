"""Functions that round once under `qsim.fpu`, and those that `keep` leaves in full precision, compared with float32 rounded afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.formats import Float
from support.comparing import same_bits

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

FORMATS = ["bf16", Float(6, 5)]
LABELS = torch.tensor([0, 3, 5, 1])
TARGET = torch.linspace(0.1, 0.9, 24).view(4, 6)
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])

#: Functions of a (4, 6) tensor and of one of six numbers.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda x, w: F.cross_entropy(x, LABELS, weight=w.detach().abs(), label_smoothing=0.1),
    "cross_entropy of probabilities": lambda x, w: F.cross_entropy(x, TARGET),
    "nll_loss": lambda x, w: F.nll_loss(x, LABELS, weight=w.detach().abs()),
    "mse_loss": lambda x, w: F.mse_loss(x, TARGET),
    "l1_loss": lambda x, w: F.l1_loss(x, TARGET),
    "smooth_l1_loss": lambda x, w: F.smooth_l1_loss(x, TARGET),
    "kl_div": lambda x, w: F.kl_div(x, TARGET, reduction="batchmean"),
    "binary_cross_entropy_with_logits": lambda x, w: F.binary_cross_entropy_with_logits(x, TARGET),
    "gaussian_nll_loss": lambda x, w: F.gaussian_nll_loss(x, TARGET, TARGET),
    "cosine_embedding_loss": lambda x, w: F.cosine_embedding_loss(x, x.detach().flip(1), SIGNS),
    "triplet_margin_loss": lambda x, w: F.triplet_margin_loss(x, x.detach().flip(0), x.detach().flip(1)),
    "gelu": lambda x, w: F.gelu(x),
    "softsign": lambda x, w: F.softsign(x),
    "tanhshrink": lambda x, w: F.tanhshrink(x),
    "logsigmoid": lambda x, w: F.logsigmoid(x),
    "logsumexp": lambda x, w: x.logsumexp(-1),
    "glu": lambda x, w: F.glu(x),
    "prelu": lambda x, w: F.prelu(x, w),
    "layer_norm": lambda x, w: F.layer_norm(x, (6,), w),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w, training=True),
    "group_norm": lambda x, w: F.group_norm(x, 2, w),
    "rms_norm": lambda x, w: F.rms_norm(x, (6,), w),
    "local_response_norm": lambda x, w: F.local_response_norm(x.view(1, 4, 6), 2),
    "normalize": lambda x, w: F.normalize(x),
    "cosine_similarity": lambda x, w: F.cosine_similarity(x, x.detach().flip(1)),
    "scaled_dot_product_attention": lambda x, w: F.scaled_dot_product_attention(x, x.detach(), x.detach(), is_causal=True),
    "attention with a mask": lambda x, w: F.scaled_dot_product_attention(x.detach(), x.detach(), x, attn_mask=w[:4].detach().expand(4, 4)),
}  # fmt: skip


def operands(fmt: object) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [qsim.quantize(torch.randn(shape, generator=generator), fmt).requires_grad_() for shape in ((4, 6), (6,))]


def run(function: Callable[[Tensor, Tensor], Tensor], given: list[Tensor]) -> list[Tensor]:
    value = function(*given)
    found = torch.autograd.grad(value, given, torch.full_like(value, 0.75), allow_unused=True)
    return [value.detach(), *(g for g in found if g is not None)]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_rounds_once_forward_and_backward(name: str, fmt: str | Float) -> None:
    given = operands(fmt)
    exact = run(FUNCTIONS[name], given)
    with qsim.fpu(fmt, overflow="nonfinite"):
        found = run(FUNCTIONS[name], given)
    assert len(found) == len(exact)
    assert not same_bits(exact[0], found[0])
    for due, one in zip(exact, found, strict=True):
        assert same_bits(one, qsim.quantize(due, fmt, overflow="nonfinite"))


@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "gelu", "rms_norm", "logsigmoid", "softsign", "normalize"])
def test_keep_leaves_values_and_gradients_as_they_are(name: str) -> None:
    given = operands("bf16")
    function = FUNCTIONS.get(name, lambda x, w: F.softmax(x, -1))
    exact = run(function, given)
    for keep in ([name], (getattr(F, name),), name):
        with qsim.fpu("bf16", keep=keep):
            found = run(function, given)
        assert all(same_bits(a, b) for a, b in zip(exact, found, strict=True))
    with qsim.fpu("bf16", keep="elu"):
        assert not same_bits(run(function, given)[0], exact[0])


def test_keep_means_all_forms_of_a_function() -> None:
    x, y = operands("bf16")
    forms: list[Callable[[], Tensor]] = [
        lambda: x + y * 0 + 0.3,
        lambda: 0.3 + x,
        lambda: torch.add(x, 0.3),
        lambda: x.add(0.3),
        lambda: x.clone().add_(0.3),
        lambda: torch.add(x.detach(), 0.3, out=torch.empty(4, 6)),
        lambda: torch._foreach_add([x.detach()], 0.3)[0],
    ]
    for form in forms:
        with qsim.fpu(None):
            due = form()
        with qsim.fpu("bf16", keep=["add"]):
            assert same_bits(form().detach(), due.detach())
        with qsim.fpu("bf16"):
            assert not same_bits(form().detach(), due.detach())
    with qsim.fpu("bf16", keep=["mul"]):
        z = x.clone()
        z *= y
        z.sum().backward()
    assert same_bits(z.detach(), (x * y).detach())
    assert same_bits(y.grad, (x.detach()).sum(0))


def test_keep_reaches_into_attention() -> None:
    attention = qsim.fpu("bf16").store(torch.nn.MultiheadAttention(6, 2))
    x, _ = operands("bf16")
    weights = []
    for keep in ((), ("softmax",)):
        with qsim.fpu("bf16", keep=keep):
            weights.append(attention(x, x, x, average_attn_weights=False)[1].detach())
    rounded, kept = weights
    assert not same_bits(rounded, kept)
    assert same_bits(rounded, qsim.quantize(kept, "bf16"))


def test_dropout_rounds_once_in_place_or_not() -> None:
    x = operands("bf16")[0]
    found = []
    for inplace in (False, True):
        torch.manual_seed(3)
        with qsim.fpu("bf16"):
            y = F.dropout(x * 1, 0.3, inplace=inplace)
            found += [y.detach(), *torch.autograd.grad(y.sum(), x)]
    torch.manual_seed(3)
    exact = F.dropout(x.detach() * 1, 0.3)
    assert same_bits(found[0], qsim.quantize(exact, "bf16"))
    assert same_bits(found[1], qsim.quantize(found[1], "bf16"))
    assert same_bits(found[0], found[2])
    assert same_bits(found[1], found[3])


def test_gradients_of_gradients_are_of_the_format() -> None:
    x, w = operands("bf16")
    with qsim.fpu("bf16"):
        first = torch.autograd.grad(F.rms_norm(x, (6,), w).square().sum(), [x, w], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, w])
    exact = torch.autograd.grad(F.rms_norm(x, (6,), w).square().sum(), [x, w], create_graph=True)
    exact_second = torch.autograd.grad(sum(g.square().sum() for g in exact), [x, w])
    for g, due in zip((*first, *second), (*exact, *exact_second), strict=True):
        assert same_bits(g.detach(), qsim.quantize(g.detach(), "bf16"))
        assert (g - due).norm() < 0.1 * due.norm()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_checkpoints_repeat_the_numbers(rounding: str, reentrant: bool) -> None:
    x, w = operands("bf16")

    def block(x: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(F.rms_norm(x, (6,), w).tanh(), 0.2), LABELS)

    found = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        with qsim.fpu("bf16", rounding):
            loss = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
            torch.manual_seed(6)
            found.append([loss.detach(), *torch.autograd.grad(loss, [x, w])] if not reentrant else _backward(loss, x, w))
    # Random bits that only the backward pass draws are drawn at other times.
    count = 3 if rounding == "nearest" else 1
    assert all(same_bits(a, b) for a, b in zip(found[0][:count], found[1][:count], strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_what_the_forward_pass_computed(reentrant: bool) -> None:
    seen: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        y = (1 + 2.0**-8 * x).clone()
        seen.append(y.detach())
        return y.tanh().sum()

    x = torch.ones(256, requires_grad=True)
    with qsim.fpu("bf16", "stochastic"):
        loss = checkpoint(block, x, use_reentrant=reentrant)
        torch.rand(3)
        loss.backward()
    first, again = seen
    assert set(first.tolist()) == {1.0, 1 + 2.0**-7}
    assert same_bits(first, again)


def _backward(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    for x in inputs:
        x.grad = None
    loss.backward()
    return [loss.detach(), *(x.grad.clone() for x in inputs if x.grad is not None)]
