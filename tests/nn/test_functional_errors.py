"""Errors of qsim.nn.functional and their messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qsim import FivePoint
from qsim.nn import functional
from support.functional_cases import Shape

NARROW = FivePoint(act="e4m3", weight="e4m3", act_bwd=None, weight_bwd=None)
ONES = torch.ones


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: functional.linear(ONES(2, 3), ONES(4, 5), points=NARROW),
            ValueError,
            r"linear: x of shape \(2, 3\) does not fit a weight of shape \(4, 5\)",
        ),
        (lambda: functional.linear(ONES(()), ONES(4, 5), points=NARROW), ValueError, r"linear: x of shape \(\) does not fit"),
        (lambda: functional.linear(ONES(2, 3), ONES(4, 3), points="mxfp9"), ValueError, "unknown recipe 'mxfp9': did you mean 'mxfp8'"),
        (lambda: functional.linear(ONES(2, 3), ONES(4, 3), points=3), TypeError, "points must be a FivePoint, a recipe, .* got 3"),
        (lambda: functional.conv1d(ONES(1, 2, 3), ONES(2, 2, 1), points={"at": "e4m3"}), ValueError, "FivePoint has no point 'at'"),
        (lambda: functional.linear(ONES(2, 3).int(), ONES(4, 3), points=NARROW), TypeError, "got an operand of torch.int32"),
        (
            lambda: functional.linear(ONES(2, 3), ONES(4, 3).to(torch.complex64), points=NARROW),
            TypeError,
            "got an operand of torch.complex64",
        ),
        (
            lambda: functional.linear(ONES(2, 3), ONES(4, 3), ONES(1), NARROW),
            ValueError,
            r"linear: bias must have shape \(4,\), got \(1,\)",
        ),
        (
            lambda: functional.conv1d(ONES(1, 2, 3).bfloat16(), ONES(4, 2, 1).bfloat16(), ONES(1).bfloat16(), points=NARROW),
            ValueError,
            r"conv1d: bias must have shape \(4,\), got \(1,\)",
        ),
        (
            lambda: functional.conv_transpose2d(ONES(1, 2, 3, 3), ONES(2, 3, 1, 1), ONES(3), groups=2, points=NARROW),
            ValueError,
            r"conv_transpose2d: bias must have shape \(6,\), got \(3,\)",
        ),
        (
            lambda: functional.linear(ONES(2, 3), ONES(4, 3).to_sparse(), points=NARROW),
            TypeError,
            "points round dense tensors only, got an operand of layout torch.sparse_coo",
        ),
        (
            lambda: functional.linear(ONES(2, 3), ONES(4, 3).to("meta"), points=NARROW),
            ValueError,
            "the operands of a product must be on one device, got cpu, meta",
        ),
        (
            lambda: functional.conv1d(ONES(1, 2, 3), ONES(4, 2, 1), ONES(4).to("meta"), points=NARROW),
            ValueError,
            "the operands of a product must be on one device, got cpu, cpu, meta",
        ),
        (lambda: functional.matmul(ONES(2, 3), ONES(2, 3), NARROW), ValueError, r"matmul: shapes \(2, 3\) and \(2, 3\) do not fit"),
        (lambda: functional.matmul(ONES(()), ONES(2), NARROW), ValueError, r"matmul: shapes \(\) and \(2,\) do not fit"),
        (lambda: functional.matmul(ONES(3), ONES(2), NARROW), ValueError, r"matmul: shapes \(3,\) and \(2,\) do not fit"),
        (lambda: functional.bmm(ONES(2, 3), ONES(3, 2), NARROW), ValueError, r"bmm: both must be batches of matrices, got shapes \(2, 3\)"),
        (lambda: functional.bmm(ONES(2, 2, 3), ONES(1, 3, 2), NARROW), ValueError, "bmm: batches of 2 and 1 matrices do not fit"),
        (
            lambda: functional.conv2d(ONES(2, 3), ONES(4, 3, 1, 1), points=NARROW),
            ValueError,
            r"conv2d: x of shape \(2, 3\) does not fit a weight of",
        ),
        (
            lambda: functional.conv_transpose1d(ONES(2, 3), ONES(4, 3), points=NARROW),
            ValueError,
            r"conv_transpose1d: x of shape \(2, 3\) does not fit",
        ),
        (lambda: functional.conv1d(ONES(1, 2, 4), ONES(2, 3, 1), points=NARROW), RuntimeError, "to have 3 channels, but got 2 channels"),
        (
            lambda: functional.conv1d(ONES(1, 2, 4), ONES(2, 2, 1), padding="full", points=NARROW),
            ValueError,
            "conv1d: padding must be numbers, 'valid' or 'same', got 'full'",
        ),
        (
            lambda: functional.conv1d(ONES(1, 2, 4), ONES(2, 2, 1), None, 2, "same", points=NARROW),
            ValueError,
            "conv1d: padding='same' needs a stride of 1",
        ),
        (
            lambda: functional.embedding(torch.tensor([0]), ONES(5, 2), 5, NARROW),
            ValueError,
            r"embedding: padding_idx must be in -5…4, got 5",
        ),
        (
            lambda: functional.embedding(torch.tensor([0]), ONES(5, 2), -6, NARROW),
            ValueError,
            r"embedding: padding_idx must be in -5…4, got -6",
        ),
        (
            lambda: functional.embedding(torch.tensor([0]), ONES(5, 2).bfloat16(), None, FivePoint(weight="fp16", weight_bwd=None)),
            ValueError,
            "torch.bfloat16, which cannot hold",
        ),
        (
            lambda: _attention(attn_mask=ONES(3, 3, dtype=torch.uint8)),
            ValueError,
            "attn_mask must be bool or floating as the query is, got torch.uint8",
        ),
        (lambda: _attention(attn_mask=ONES(3, 3), is_causal=True), ValueError, "give attn_mask or is_causal, not both"),
        (lambda: _attention((1, 5, 3, 4), (1, 2, 3, 4), enable_gqa=True), ValueError, "must divide the query's 5, got 2 and 2"),
    ],
)
def test_errors_are_clear(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def _attention(query: Shape = (1, 3, 4), key: Shape = (1, 3, 4), **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(ONES(query), ONES(key), ONES(key), **options, points=NARROW)
