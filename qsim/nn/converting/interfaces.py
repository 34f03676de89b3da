"""Implementations of attention and of experts that a model of Hugging Face chooses by name: which of them can be rounded."""

from __future__ import annotations

from typing import Any

from torch import nn

#: The name of qsim's own.
OWN = "qsim"
#: Names whose products torch computes, so that they can be rounded; others are single kernels.
_ATTENTION = ("eager", "sdpa", OWN)
_EXPERTS = ("eager", "grouped_mm", "batched_mm", OWN)


def attends_by_qsim(module: nn.Module) -> bool:
    """Whether a module's attention is computed by qsim."""
    return _chosen(module, "attn") == OWN


def check_attention(title: str, module: nn.Module) -> None:
    """Raise an error for attention in a kernel whose products cannot be rounded."""
    _check(title, "attn", _chosen(module, "attn"), _ATTENTION)


def check_experts(title: str, module: nn.Module) -> None:
    """Raise an error for experts in a kernel whose products cannot be rounded."""
    if hasattr(module, "_apply_gate"):  # transformers' mark of modules that choose by name
        _check(title, "experts", _chosen(module, "experts"), _EXPERTS)


def _chosen(module: nn.Module, kind: str) -> str | None:
    config: Any = getattr(module, "config", None)
    name = getattr(config, f"_{kind}_implementation", None)
    return name if isinstance(name, str) else None


def _check(title: str, kind: str, name: str | None, allowed: tuple[str, ...]) -> None:
    if name is not None and name not in allowed:
        instead = ", ".join(map(repr, allowed[:-1])) + f" or {allowed[-1]!r}"
        raise ValueError(
            f"convert: {title} computes in the kernel {kind}_implementation={name!r}, whose products cannot be rounded: choose {instead}, "
            "or exclude it"
        )
