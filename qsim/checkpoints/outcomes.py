"""The result of an export, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from qsim.text.records import Records, Values

#: A layer's weights are written as low-precision numbers, cannot be, or are written in high precision.
Outcome = Literal["written", "refused", "high precision"]


@dataclass(frozen=True)
class ExportedLayer:
    """A layer of an export.

    Attributes:
        layer: Its name.
        outcome: `"written"` as low-precision numbers, `"refused"` by the layout, or `"high precision"`.
        numbers: Numbers that are written.
        note: What is worth knowing about them, or the reason why there are none.

    Example:
        >>> import qsim
        >>> qsim.checkpoints.ExportedLayer("head", "high precision", note="the recipe keeps it")
        ExportedLayer(layer='head', outcome='high precision', numbers='', note='the recipe keeps it')
    """

    layer: str
    outcome: Outcome
    numbers: str = ""
    note: str = ""


@dataclass(frozen=True)
class Export(Records[ExportedLayer]):
    """Layers of an export, or of a dry run, which also has those that are not written; prints as a table.

    Attributes:
        records: The layers.
        layout: The layout.
        folder: Folder of the checkpoint; `None` of a dry run.

    Example:
        >>> import torch, qsim
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Conv1d(48, 32, 1), torch.nn.Linear(32, 2))
        >>> found = qsim.export(qsim.convert(model, "fp8_hybrid", exclude=["2"]), "served", dry_run=True)
        >>> print(found)
        0  written         weight=e4m3 tensor, act=e4m3 tensor
        1  refused         it is a Conv1d, and layouts hold linear layers
        2  high precision  not chosen
        >>> [layer.layer for layer in found.filter(outcome="refused")]
        ['1']
    """

    layout: str
    folder: Path | None = None

    COLUMNS: ClassVar[Values] = {
        "layer": "layer",
        "outcome": "outcome",
        "numbers": lambda layer: layer.numbers or layer.note,
        "note": lambda layer: layer.note if layer.numbers else "",
    }
    HAS_TITLES: ClassVar[bool] = False
    KEY: ClassVar[tuple[str, ...]] = ("layer",)
    NAME: ClassVar[str] = "layers"

    @property
    def layers(self) -> tuple[tuple[str, str, str], ...]:
        """The name of each layer that gets low-precision weights, its numbers, and a note, if there is anything to know."""
        return tuple((layer.layer, layer.numbers, layer.note) for layer in self.filter(outcome="written"))

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """The name of each layer that the layout cannot express, and the reason. If there are any, `qsim.export` raises an error."""
        return self._reasons("refused")

    @property
    def kept(self) -> tuple[tuple[str, str], ...]:
        """The name of each layer that is written in high precision, and the reason."""
        return self._reasons("high precision")

    def _reasons(self, outcome: Outcome) -> tuple[tuple[str, str], ...]:
        return tuple((layer.layer, layer.note) for layer in self.filter(outcome=outcome))

    def _blocks(self) -> Export:
        """Layers of repeated blocks share a row, with `*` for the numbers of the blocks, if it is the same for all of them."""
        return replace(self, records=tuple(layer for layer, _ in self.by_block()))
