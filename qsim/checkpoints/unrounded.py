"""Exclusion of modules from an export, and errors or warnings for products that layouts cannot hold."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from qsim.nn.calls.settings import call_points, own_matrices
from qsim.nn.converting.patterns import listed, matches
from qsim.text.warning import warn


def excluded_modules(model: nn.Module, exclude: str | Iterable[str] | None) -> set[str]:
    """The names of the modules that patterns of names match, as in `convert`."""
    names = [name for name, _ in model.named_modules()]
    patterns = listed("export", "exclude", exclude)
    for pattern in patterns:
        if not any(matches([name], [pattern]) for name in names):
            raise ValueError(f"export: exclude pattern {pattern!r} matches no module")
    return {name for name in names if matches([name], patterns)}


def check_unrounded_weights(model: nn.Module, excluded: set[str], stored: set[str]) -> None:
    """Raise an error for modules that round stacks of matrices; warn of those that may round other weights; see `unrounded_weights`."""
    refused, called = unrounded_weights(model, excluded, stored)
    for name, reason in refused.items():
        raise ValueError(f"export: {name or 'the model'} {reason}")
    if called:
        warn(f"export: layouts hold linear layers; written in high precision, although products with them are rounded: {', '.join(called)}")


def unrounded_weights(model: nn.Module, excluded: set[str], stored: set[str]) -> tuple[dict[str, str], list[str]]:
    """The modules outside of layers whose rounded products a checkpoint cannot hold.

    Args:
        model: The model.
        excluded: The names of modules that are written in high precision.
        stored: The names of stacks whose matrices are written one by one, as experts.

    Returns:
        The modules that round stacks of matrices, and why that cannot be written; and the names of other weights, which stay in high
        precision.
    """
    refused: dict[str, str] = {}
    called: list[str] = []
    for name, module in model.named_modules():
        calls = call_points(module)
        if calls is None or calls.points.weight is None or name in excluded or isinstance(module, nn.Embedding):
            continue
        own = [key for key in own_matrices(module) if f"{name}.{key}" not in stored]
        stacks = [key for key in own if min(module.get_parameter(key).shape) > 1 and module.get_parameter(key).dim() > 2]
        if stacks:
            wanted = f"which checkpoints do not have as linear layers: exclude={name!r} writes them in high precision"
            refused[name] = f"rounds products with {', '.join(stacks)}, {wanted}"
            continue
        called += [f"{name}.{key}".removeprefix(".") for key in own]
    return refused, called
