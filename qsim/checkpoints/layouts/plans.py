"""The interface of layouts: how a library names, packs and describes the low-precision weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from qsim.checkpoints.layouts.weights import CodedWeight, coded_weight, stacked
from qsim.formats import E8M0
from qsim.functional.quantizer import Quantizer, short
from qsim.nn.modules import FivePointModule
from qsim.scaling import PerBlock, PerTile, Scaling


@dataclass(frozen=True)
class LayerPlan:
    """A layer and its place in a layout.

    Attributes:
        layer: The layer.
        weight: The rounding of its weight, as `forward_weight` gives it.
        original: The layer's point `weight`.
        act: The rounding of its input, if the layout describes one.
        scheme: The layer's description in the layout, as JSON has it.
        static: Tensors that do not follow from the weight, by the suffixes of their names.
        outer: The scale of the whole weight, if layers that servers merge have a common one.
        rows: The rows of the layer's weight that the checkpoint has under this name; all by default.
        stack: The layers of all matrices, if the checkpoint has a stack of them under this name.
    """

    layer: FivePointModule
    weight: Quantizer
    original: Quantizer
    act: Quantizer | None
    scheme: Mapping[str, Any]
    static: Mapping[str, Tensor]
    outer: Tensor | None = None
    rows: range | None = None
    stack: Sequence[FivePointModule] = ()

    def coded(self) -> CodedWeight:
        """The weight in codes.

        Raises:
            ValueError: If it is not finite.
        """
        if self.stack:
            return stacked([coded_weight(layer, self.weight) for layer in self.stack])
        whole = coded_weight(self.layer, self.weight)
        return whole if self.rows is None else whole.part(self.rows)

    @property
    def title(self) -> str:
        """The roundings in short."""
        return f"weight={short(self.original)}" + ("" if self.act is None else f", act={short(self.act)}")


class CheckpointLayout(Protocol):
    """A layout of checkpoints."""

    name: str
    #: Whether it has the experts of a stack as linear layers, or the stack itself.
    experts: Literal["single", "stacked"]

    def plan(self, layer: FivePointModule, input_amax: Tensor | None, *, weight_only: bool) -> LayerPlan:
        """Find a layer's place in the layout.

        Args:
            layer: The layer.
            input_amax: The largest magnitude of its inputs, if an example was given.
            weight_only: Leave inputs in high precision.

        Raises:
            LayoutError: If the layout cannot express the layer's points.
        """

    def together(self, plans: Mapping[str, LayerPlan]) -> dict[str, LayerPlan]:
        """Adapt the plans of layers to each other."""

    def tensors(self, name: str, plan: LayerPlan, coded: CodedWeight) -> tuple[dict[str, Tensor], str]:
        """The tensors of a layer's weight by their names in the checkpoint, and a note for the table, or an empty one."""

    def configuration(self, plans: Mapping[str, LayerPlan], others: list[str]) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint with these layers, and with the names of linear layers in high precision."""

    def metadata(self, plans: Mapping[str, LayerPlan], others: list[str]) -> dict[str, str]:
        """Return the text for the headers of the files, given the names of all other tensors."""


def is_microscaled(scale: Scaling | None) -> bool:
    """Whether scales are powers of two as in MX formats, which have no scale of the whole tensor."""
    return scale is not None and scale.format == E8M0 and scale.outer is None


def is_grouped(scale: Scaling | None, columns: int, size: int) -> bool:
    """Whether scales can be written as one for every `size` neighbours in a row of so many columns."""
    width = scale.size if isinstance(scale, PerBlock) else scale.width if isinstance(scale, PerTile) else 0
    return width > 0 and width % size == 0 and columns % size == 0
