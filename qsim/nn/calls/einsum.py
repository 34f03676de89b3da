"""`torch.einsum`, `tensordot` and `inner` as products of batches of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from string import ascii_letters
from typing import Any

from torch import Tensor

from qsim.nn.calls.points import of_activations, weight_of
from qsim.nn.calls.products import multiply

#: Labels of the dimensions that an ellipsis means, which letters of equations are not.
_UNNAMED = "0123456789"


def einsum(equation: Any, *given: Any, path: Any = None) -> Tensor | None:
    """`torch.einsum` with an equation: operands are multiplied from left to right, whatever the path."""
    tensors = list(given[0]) if len(given) == 1 and isinstance(given[0], (list, tuple)) else list(given)
    if not isinstance(equation, str) or len(tensors) < 2 or not _rounds(tensors):
        return None
    labels, result = _labels(equation, tensors)
    if any(len(set(zip(own, x.shape, strict=False))) > len(set(own)) for own, x in zip(labels, tensors, strict=True)):
        return None  # torch raises an error about a diagonal
    first: Tensor = tensors[0]
    of_first = labels[0]
    for i, (second, of_second) in enumerate(zip(tensors[1:], labels[1:], strict=True), 2):
        later = set(result).union(*labels[i:])
        first, of_first = _product(first, of_first, second, of_second, later)
    return first.permute([of_first.index(label) for label in result])


def _rounds(tensors: Sequence[Tensor]) -> bool:
    """Whether any product of tensors, from left to right, is rounded."""
    return any(weight_of(x) is not None for x in tensors) or of_activations(tensors[0], tensors[1]) is not None


def tensordot(a: Tensor, b: Tensor, dims: Any = 2, dims_other: Sequence[int] | None = None) -> Tensor | None:
    """`torch.tensordot`, whose dimensions are a number or two lists, or its operator, which takes the lists one by one."""
    given = (dims, dims_other) if dims_other is not None else (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    of_a, of_b = ascii_letters[: a.dim()], list(ascii_letters[a.dim() : a.dim() + b.dim()])
    for i, j in zip(*given, strict=True):
        of_b[j] = of_a[i]
    once = [label for label in (*of_a, *of_b) if (label in of_a) != (label in of_b)]
    return einsum(f"{of_a},{''.join(of_b)}->{''.join(once)}", a, b)


def inner(input: Tensor, other: Tensor) -> Tensor | None:
    """`torch.inner`, over the last dimension of both."""
    return tensordot(input, other, ([-1], [-1])) if input.dim() and other.dim() else None


def _product(a: Tensor, of_a: str, b: Tensor, of_b: str, later: set[str]) -> tuple[Tensor, str]:
    """The product of two operands, summed over what is not needed later, and its labels. One without a sum is not rounded."""
    weights = weight_of(a), weight_of(b)
    a, of_a = _diagonals(a, of_a)
    b, of_b = _diagonals(b, of_b)
    only = [label for label in of_a + of_b if label not in later and (label not in of_a or label not in of_b)]
    a = a.sum([of_a.index(label) for label in only if label in of_a]) if set(only) & set(of_a) else a
    b = b.sum([of_b.index(label) for label in only if label in of_b]) if set(only) & set(of_b) else b
    of_a, of_b = ("".join(label for label in own if label not in only) for own in (of_a, of_b))
    shared = [label for label in of_a if label in of_b]
    batch = "".join(label for label in shared if label in later)
    summed = "".join(label for label in shared if label not in later)
    rows = "".join(label for label in of_a if label not in shared)
    columns = "".join(label for label in of_b if label not in shared)
    sizes = dict(zip(of_b, b.shape, strict=True)) | {
        label: n for label, n in zip(of_a, a.shape, strict=True) if n != 1 or label not in of_b
    }
    a, b = (x.expand([sizes[label] for label in own]) for x, own in ((a, of_a), (b, of_b)))  # of shared dimensions one may be 1
    left = _arranged(a, of_a, (batch, rows, summed))
    right = _arranged(b, of_b, (batch, summed, columns))
    found = multiply(left, right, *weights) if summed else left * right
    found = left @ right if found is None else found
    return found.reshape([sizes[label] for label in batch + rows + columns]), batch + rows + columns


def _diagonals(x: Tensor, labels: str) -> tuple[Tensor, str]:
    """A tensor with one dimension for each label, where several have the same."""
    for label in labels:
        while labels.count(label) > 1:
            i, j = labels.index(label), labels.rindex(label)
            x, labels = x.diagonal(0, i, j), labels[:i] + labels[i + 1 : j] + labels[j + 1 :] + label
    return x, labels


def _arranged(x: Tensor, labels: str, groups: Sequence[str]) -> Tensor:
    """A tensor as a batch of matrices, given the labels of the batch, of rows and of columns; a matrix if there is no batch."""
    sizes = dict(zip(labels, x.shape, strict=True))
    moved = x.permute([labels.index(label) for group in groups for label in group])
    shape = [prod([sizes[label] for label in group]) for group in groups]
    return moved.reshape(shape if groups[0] else shape[1:])


def _labels(equation: str, tensors: Sequence[Tensor]) -> tuple[list[str], str]:
    """The labels of each operand and of the result, with one for each dimension that an ellipsis means."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    given = terms.split(",")
    hidden = max(x.dim() - len(term.replace("...", "")) if "..." in term else 0 for term, x in zip(given, tensors, strict=True))
    found = [
        term.replace("...", _UNNAMED[hidden - (x.dim() - len(term) + 3) : hidden]) if "..." in term else term
        for term, x in zip(given, tensors, strict=True)
    ]
    if not arrow:
        letters = terms.replace("...", "").replace(",", "")
        result = ("..." if "..." in terms else "") + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    return found, result.replace("...", _UNNAMED[:hidden])
