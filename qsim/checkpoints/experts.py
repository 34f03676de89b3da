"""Experts in tensors with three dimensions, as the linear layers that checkpoints have for each of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from qsim.checkpoints import architectures
from qsim.functional.quantizer import Quantizer
from qsim.nn.calls.settings import call_points
from qsim.nn.histories import histories_of
from qsim.nn.modules import Linear
from qsim.recipes.five_point import FivePoint
from qsim.scaling import PerBlock, PerTile
from qsim.scaling.tiling import PerSlice


@dataclass(frozen=True)
class Expert:
    """A linear layer of a checkpoint: rows of one matrix of a stack.

    Attributes:
        parameter: The name of the stack in the model.
        index: The number of the matrix in the stack.
        layer: The whole matrix as a layer, with the points of the products with the stack.
        rows: The rows.
    """

    parameter: str
    index: int
    layer: Linear
    rows: range


def experts(model: nn.Module, excluded: set[str]) -> dict[str, Expert]:
    """The experts that round, by the names of their layers in a checkpoint; none for stacks that checkpoints do not take apart.

    Args:
        model: The model.
        excluded: The names of modules to leave out.

    Raises:
        ValueError: If the forward pass multiplies several experts at once under a scale that they share.
    """
    found: dict[str, Expert] = {}
    for name, module in model.named_modules():
        calls = call_points(module)
        if calls is None or calls.points.weight is None or name in excluded:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            pieces = architectures.checkpoint_pieces(model, f"{name}.{key}", parameter) if parameter.dim() == 3 else None
            if pieces is not None:
                _check_batches(model, name, calls.points)
                found |= _of_stack(module, f"{name}.{key}", parameter, calls.points, pieces)
    return found


def stacks(found: Iterable[Expert]) -> dict[str, list[Linear]]:
    """The matrices of each stack as layers, by the name of the parameter."""
    numbered: dict[str, dict[int, Linear]] = {}
    for expert in found:
        numbered.setdefault(expert.parameter, {})[expert.index] = expert.layer
    return {name: [layers[i] for i in sorted(layers)] for name, layers in numbered.items()}


def _of_stack(module: nn.Module, name: str, stack: Tensor, points: FivePoint, pieces: Mapping[str, tuple[int, range]]) -> dict[str, Expert]:
    layers = [_layer(module, name.rpartition(".")[2], matrix, points) for matrix in stack.detach()]
    return {piece.removesuffix(".weight"): Expert(name, i, layers[i], rows) for piece, (i, rows) in pieces.items()}


def _layer(module: nn.Module, key: str, matrix: Tensor, points: FivePoint) -> Linear:
    """A linear layer with a matrix of a stack, and the histories of the stack."""
    layer = Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta", points=points, stream=0)
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    for history in histories_of(layer).values():
        for buffer in history.names:
            setattr(layer, buffer, module.get_buffer(f"{key}_{buffer}"))
    return layer


def _check_batches(model: nn.Module, name: str, points: FivePoint) -> None:
    """Raise an error for scales of whole weights where a product has the matrices of several experts."""
    point = points.weight
    assert isinstance(point, Quantizer)  # only such modules are looked at
    scale = point.scale
    whole = scale is not None and not (isinstance(scale, (PerBlock, PerSlice, PerTile)) and scale.outer is None)
    if whole and getattr(getattr(model, "config", None), "_experts_implementation", None) == "batched_mm":
        raise ValueError(
            f"export: {name} multiplies the experts of several tokens at once, under one scale of the whole weight: "
            "model.set_experts_implementation('grouped_mm') gives every expert its own"
        )


def taken_apart(model: nn.Module, saved: Container[str]) -> dict[str, dict[str, tuple[int, range]]]:
    """The model's tensors that a checkpoint has in pieces or under another name; see `architectures.checkpoint_pieces`."""
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in saved}
    found = {name: architectures.checkpoint_pieces(model, name, tensor) for name, tensor in own.items()}
    return {name: parts for name, parts in found.items() if parts is not None and all(part in saved for part in parts)}


def part_of(whole: Tensor, place: tuple[int, range]) -> Tensor:
    """The rows of a tensor, or of one of its matrices, that a checkpoint has under a name of their own."""
    i, rows = place
    return (whole if whole.dim() < 3 else whole[i])[rows.start : rows.stop]
