"""Attention as the models of Hugging Face call it, with both products rounded at the points of the module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsim.nn import functional
from qsim.nn.calls.running import running, without_inner_rounding
from qsim.nn.calls.settings import call_points
from qsim.nn.modules import FivePointModule
from qsim.nn.product import observers
from qsim.recipes.five_point import FivePoint
from qsim.text.warning import warn


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in the signature of transformers' `AttentionInterface`.

    Queries that share a key are rows of one product, so keys and values are rounded once, and their gradients are one sum over all these
    queries. The softmax is computed in float32.

    Args:
        module: The attention module, which has the points if it was converted.
        query: Of shape (batch, heads, queries, width).
        key: Of shape (batch, key heads, keys, width).
        value: Of shape (batch, key heads, keys, width).
        attention_mask: Added to the scores.
        dropout: The probability of dropping a weight, in training.
        scaling: The factor of the scores; one over the root of the width by default.
        softcap: The bound of the scores, which a tanh imposes.
        position_bias: Added to the scores.
        s_aux: A score for each head that takes part in the softmax, but has no value.

    Returns:
        The mixed values, of shape (batch, queries, heads, width), and the weights.
    """
    points = _points(module)
    shape = (-1, *query.shape[1:3])
    scores = _product(module, _grouped(query, key), key.mT, points, "scores").reshape(*shape, key.shape[2])
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    for added in (position_bias, attention_mask):
        scores = scores if added is None else scores + added
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    mixed = _product(module, _grouped(weights, value), value, points, "mixed").reshape(*shape, value.shape[-1])
    return mixed.transpose(1, 2).contiguous(), weights


def _grouped(rows: Tensor, shared: Tensor) -> Tensor:
    """Rows of several heads below one another, for each head of keys or values."""
    return rows.reshape(rows.shape[0], shared.shape[1], -1, rows.shape[-1])


def _product(module: nn.Module, a: Tensor, b: Tensor, points: FivePoint | None, name: str) -> Tensor:
    if points is None:
        return a @ b
    tracer = running.tracer
    compute = partial(_rounded_product, module, points, name)
    found: Tensor = compute(a, b) if tracer is None or tracer.is_inside else tracer.called(torch.matmul, (a, b), {}, compute)
    return found


def _rounded_product(module: nn.Module, points: FivePoint, name: str, a: Tensor, b: Tensor) -> Tensor:
    observers.enter_call(module, "")
    calls = call_points(module)
    assert calls is not None  # it gave the points
    product: Tensor = without_inner_rounding(functional.matmul, a, b, points, stream=calls.stream(module.training, name))
    return product


def _points(module: nn.Module) -> FivePoint | None:
    """The points of a module's products of activations, if it has any."""
    calls = call_points(module)
    if calls is not None:
        return calls.points if calls.of_activations else None
    layers = [] if torch.compiler.is_compiling() else [part for part in module.modules() if isinstance(part, FivePointModule)]
    if any(not layer.points.is_identity for layer in layers):
        warn(
            f"attn_implementation='qsim': the layers of {type(module).__name__} round, and its products do not, because the conversion "
            "left them out: convert the model again, or choose 'sdpa'"
        )
    return None
