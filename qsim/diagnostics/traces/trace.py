"""A trace: the operations of one training step in causal order, and the tensors that went in and came out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from qsim.diagnostics.traces.stores import TensorFile, TensorFolder, write_tensors
from qsim.text.files import check_shape, reading

#: The entry of a file's metadata that describes the trace, and its shape.
_ENTRY = "qsim_trace"
_SHAPE = {
    "operations": [{"layer": str, "name": str, "call": int, "settings": str, "points": str, "state": [str], "is_module": bool}],
    "order": [str],
    "state": {str: str},
}


@dataclass(frozen=True)
class Operation:
    """An operation of a run: one call of a layer, or of a function of torch.

    Attributes:
        layer: Name of the layer, or of the innermost module that called the function; empty for the model itself.
        name: The class of the layer or the name of the function.
        call: Number of the call, starting at 1: layers and functions may be called several times.
        settings: The layer as it prints, or the arguments of the function that are no tensors.
        points: Points of a layer that has some, with all their options.
        state: Names of the parameters and buffers that it uses.
        is_module: Whether it is a layer.

    Example:
        >>> from qsim.diagnostics import Operation
        >>> Operation("blocks.0.up", "Linear").title, Operation("blocks.0", "softmax", call=2, is_module=False).title
        ('blocks.0.up', 'blocks.0:softmax#2')
    """

    layer: str
    name: str
    call: int = 1
    settings: str = ""
    points: str = ""
    state: tuple[str, ...] = ()
    is_module: bool = True

    @property
    def title(self) -> str:
        """The key of its tensors in a trace."""
        function = "" if self.is_module else f":{self.name}"
        return f"{self.layer}{function}{f'#{self.call}' if self.call > 1 else ''}"


@dataclass(frozen=True)
class Trace:
    """Operations of a training step in causal order, with their tensors: what `qsim.diagnostics.trace` records.

    A tensor's name is the title of its operation and its role, `"blocks.0.up/output.0"`: roles are `input`, `output`, `grad_output` and
    `grad_input`, each with a number. Parameters have `"blocks.0.up.weight/grad"` and, after an optimizer's step, `"…/updated"`. A
    safetensors file whose tensors have such names is a trace, of whatever program: other frameworks need only write the outputs.

    Attributes:
        operations: Operations by their titles, in the order of the forward pass.
        order: Names of the tensors that operations computed, in causal order.
        state: A checksum of each parameter and buffer before the run.
        tensors: Tensors by name, in memory, or read when they are needed.

    Example:
        >>> import tempfile, torch, qsim
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> trace = qsim.diagnostics.trace(model, torch.ones(3, 4))
        >>> trace
        Trace(4 operations, 19 tensors)
        >>> trace.order[:3], trace.order[-1]
        (['0/output.0', '1/output.0', '2/output.0'], '0.weight/grad')
        >>> file = tempfile.mkdtemp() + "/run.safetensors"
        >>> trace.save(file)
        >>> torch.equal(qsim.diagnostics.Trace.load(file).tensors["2/output.0"], model(torch.ones(3, 4)))
        True
    """

    operations: Mapping[str, Operation] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    state: Mapping[str, str] = field(default_factory=dict)
    tensors: MutableMapping[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Trace({len(self.operations)} operations, {len(self.tensors)} tensors)"

    def numbered(self, title: str, role: str) -> dict[int, Tensor]:
        """Tensors of an operation in a role, by their numbers."""
        start = f"{title}/{role}."
        return {int(name[len(start) :]): self.tensors[name] for name in self._names.get(title, ()) if name.startswith(start)}

    @property
    def _names(self) -> Mapping[str, list[str]]:
        """The names of the tensors of each operation."""
        if "names" not in self.__dict__:
            found: dict[str, list[str]] = {}
            for name in self.tensors:
                found.setdefault(name.rpartition("/")[0], []).append(name)
            self.__dict__["names"] = found
        names: Mapping[str, list[str]] = self.__dict__["names"]
        return names

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file.

        Raises:
            ImportError: If safetensors is not installed.
        """
        write_tensors(Path(file), dict(self.tensors), {_ENTRY: json.dumps(self._description())})

    def _description(self) -> dict[str, Any]:
        return {"operations": [asdict(each) for each in self.operations.values()], "order": self.order, "state": dict(self.state)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace that `save` has written, a folder in which `trace(…, folder=…)` has kept one, or another program's file.

        Tensors are read when they are needed. Without a description, as in files of other programs, the operations are those that tensors
        name, and their order is that of the run that they are compared with.

        Raises:
            FileError: If the file is not a safetensors file, or its description is malformed.
            FileNotFoundError: If there is no such file.
            ImportError: If safetensors is not installed.
        """
        place = Path(path)
        if not place.exists():
            raise FileNotFoundError(f"Trace.load: there is no {place}")
        store = TensorFolder(place) if place.is_dir() else TensorFile(place)
        with reading("Trace.load", place):
            text = store.metadata.get(_ENTRY)
            if text is None:
                return cls({title: Operation(title, "") for title in _titles(store)}, [], {}, store)
            given = json.loads(text)
            check_shape(given, _SHAPE, "the description of the trace")
            operations = [Operation(**{**each, "state": tuple(each["state"])}) for each in given["operations"]]
        return cls({each.title: each for each in operations}, given["order"], given["state"], store)

    def close(self) -> None:
        """Complete a folder, so that `load` can read it."""
        if isinstance(self.tensors, TensorFolder):
            self.tensors.describe({_ENTRY: json.dumps(self._description())})


def _titles(names: Iterable[str]) -> list[str]:
    """The operations whose outputs or gradients are among tensors."""
    pairs = (name.rpartition("/") for name in names)
    return list(dict.fromkeys(title for title, _, role in pairs if role.partition(".")[0] in ("output", "grad_input")))
