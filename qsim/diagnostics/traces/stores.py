"""Tensors by name in safetensors files: all in one, or each in its own, written as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import count
from pathlib import Path

from torch import Tensor

from qsim.checkpoints.shards import safetensors
from qsim.text.files import FileError, name_in_folder, read_json, reading, whole_file, write_whole

_INDEX = "trace.json"


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    plain = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    package = safetensors("Trace.save")
    with whole_file(file) as draft:
        package.torch.save_file(plain, str(draft), dict(metadata))


class TensorFile(MutableMapping[str, Tensor]):
    """The tensors of a safetensors file, read when they are needed."""

    def __init__(self, file: Path) -> None:
        package = safetensors("Trace.load")
        with reading("Trace.load", file):
            try:
                self._file = package.safe_open(str(file), "pt")
            except package.SafetensorError as error:
                raise FileError(f"Trace.load: {file} is malformed: {error}") from error
            self._keys = dict.fromkeys(self._file.keys())
        self.metadata: Mapping[str, str] = self._file.metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._keys:
            raise KeyError(name)
        x: Tensor = self._file.get_tensor(name)
        return x

    def __setitem__(self, name: str, x: Tensor) -> None:
        raise TypeError("the tensors of a file cannot be changed")

    def __delitem__(self, name: str) -> None:
        raise TypeError("the tensors of a file cannot be changed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _numbered(number: int) -> str:
    """The name of a file in a folder."""
    return f"{number:06}.safetensors"


class TensorFolder(MutableMapping[str, Tensor]):
    """Tensors that are each kept in a file of a folder, so that none stays in memory."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._files = folder, dict[str, str]()
        self._numbers: Iterator[int] = count()
        self.metadata: Mapping[str, str] = {}
        if (folder / _INDEX).exists():
            given = read_json("Trace.load", folder / _INDEX, {"files": {str: str}, "metadata": {str: str}})
            self._files = {name: name_in_folder("Trace.load", folder / _INDEX, file) for name, file in given["files"].items()}
            self.metadata = given["metadata"]
            known = set(self._files.values())
            self._numbers = (number for number in count() if _numbered(number) not in known)

    def describe(self, metadata: Mapping[str, str]) -> None:
        """Write the index, with metadata."""
        self.metadata = metadata
        write_whole(self._folder / _INDEX, json.dumps({"files": self._files, "metadata": dict(metadata)}))

    def __getitem__(self, name: str) -> Tensor:
        return TensorFile(self._folder / self._files[name])[name]

    def __setitem__(self, name: str, x: Tensor) -> None:
        if name not in self._files:
            self._files[name] = _numbered(next(self._numbers))
        write_tensors(self._folder / self._files[name], {name: x}, {})

    def __delitem__(self, name: str) -> None:
        (self._folder / self._files.pop(name)).unlink()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
