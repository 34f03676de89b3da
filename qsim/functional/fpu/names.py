"""Functions that count as one operator, and the names under which users know functions."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

#: Losses, normalizations and activations that torch decomposes into several operators, on some device or in the backward pass.
ONCE = frozenset((
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "ctc_loss",
    "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss",
    "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss", "cosine_similarity", "instance_norm",
    "local_response_norm", "normalize", "pairwise_distance", "rms_norm", "gumbel_softmax", "log_sigmoid", "logsumexp", "prelu",
    "scaled_dot_product_attention", "softmin", "softsign", "tanhshrink", "alpha_dropout", "dropout", "dropout1d", "dropout2d",
    "dropout3d", "feature_alpha_dropout", "feature_dropout", "product_with_seeds",
))  # fmt: skip

#: Functions of qsim that have their own roundings, built from operators of torch.
THEIR_OWN = frozenset({"threshold_quantize"})

#: Names in Python and NumPy that differ from torch's.
_SPELLINGS = {
    "radd": "add", "iadd": "add", "rsub": "sub", "isub": "sub", "subtract": "sub", "rmul": "mul", "imul": "mul", "multiply": "mul",
    "truediv": "div", "rtruediv": "div", "itruediv": "div", "rdiv": "div", "idiv": "div", "divide": "div", "true_divide": "div",
    "rmatmul": "matmul", "imatmul": "matmul", "rpow": "pow", "ipow": "pow", "negative": "neg", "absolute": "abs", "clip": "clamp",
}  # fmt: skip


def name_of(function: Any) -> str:
    """The common name of a function in all its forms: a method, in place, a Python operator, for lists of tensors."""
    name = getattr(function, "__name__", "").removeprefix("_foreach_").strip("_")
    return _SPELLINGS.get(name, name)


def kept_functions(names: object) -> frozenset[str]:
    """The functions that a user names, by their common names.

    Raises:
        TypeError: If it is not a list of names and functions.
        ValueError: If torch has no such function, or modes do not see it.
    """
    if isinstance(names, str) or callable(names):
        names = [names]
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise TypeError(f"fpu: keep must be names of torch's functions, or these functions, got {names!r}")
    return frozenset(_known(name) for name in names)


def _known(given: object) -> str:
    known, functions = _overridable()
    if isinstance(given, str):
        name = known.get(given.removeprefix("torch.").removeprefix("nn.functional.").removeprefix("Tensor."))
        if name is None:
            close = difflib.get_close_matches(given, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"fpu: keep must name functions of torch that take tensors, and none is called {given!r}{hint}")
        return name
    if not callable(given):
        raise TypeError(f"fpu: keep must be names of torch's functions, or these functions, got {given!r}")
    if given not in functions and not any(getattr(space, getattr(given, "__name__", ""), None) is given for space in (torch, torch.Tensor)):
        close = difflib.get_close_matches(getattr(given, "__name__", "").lower(), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"fpu: keep must name functions of torch, such as torch.nn.functional.softmax, got {given!r}{hint}")
    return name_of(given)


@lru_cache(maxsize=1)
def _overridable() -> tuple[dict[str, str], frozenset[Callable[..., Any]]]:
    """The functions that torch lets modes see, and their names."""
    spaces = (torch, torch.functional, F, torch.Tensor, torch.linalg, torch.fft, torch.special)
    by_space = torch.overrides.get_overridable_functions()
    found = frozenset(function for space in spaces for function in by_space.get(space, ()))
    names = {name_of(f): name_of(f) for f in found} | {f.__name__: name_of(f) for f in found if hasattr(f, "__name__")}
    # The name under which users find a function may not be its own.
    names |= {name: name_of(f) for name, f in vars(F).items() if callable(f) and f in found}
    names |= {old: new for old, new in _SPELLINGS.items() if new in names}
    return {name: one for name, one in names.items() if one and one != "get"}, found
