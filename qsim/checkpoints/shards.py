"""Tensors in safetensors files: one, or several with an index, named as Hugging Face names them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsim.text.files import FileError, name_in_folder, read_json

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAME, _INDEX = "model.safetensors", "model.safetensors.index.json"


def safetensors(action: str) -> Any:
    """The package safetensors.

    Args:
        action: The function that needs it, for the error.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{action} needs safetensors: pip install 'qsim-torch[export]'") from error
    return safetensors


def size_in_bytes(action: str, size: int | str) -> int:
    """The largest size of a file, from a number of bytes or a text such as `"5GB"`.

    Example:
        >>> from qsim.checkpoints.shards import size_in_bytes
        >>> size_in_bytes("save", "5GB"), size_in_bytes("save", "1.5 KiB")
        (5000000000, 1536)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B)", size.strip().upper()) if isinstance(size, str) else None
    number = float(found[1]) * _UNITS[found[2]] if found is not None and found[2] in _UNITS else size
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number < 1:
        raise ValueError(f"{action}: max_shard_size must be a number of bytes or a text such as '5GB', got {size!r}")
    return int(number)


class ShardWriter:
    """A writer of tensors into files of limited size: only those of the current file are in memory.

    Args:
        folder: The folder to write to.
        largest: The largest size of a file in bytes. A tensor that exceeds it gets a file of its own.
        metadata: Text for the header of every file.
    """

    def __init__(self, folder: Path, largest: int, metadata: Mapping[str, str]) -> None:
        self._package = safetensors("writing checkpoints")
        self._folder, self._largest = folder, largest
        self.metadata = {"format": "pt", **metadata}
        self._pending: dict[str, Tensor] = {}
        self._pending_size = self._total_size = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, from any device."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_size + size > self._largest:
            self._flush()
        # A clone, because tensors that share memory cannot be written, and views would write all that they are views of.
        held = tensor.detach().to("cpu")
        self._pending[name] = held.clone() if held.data_ptr() == tensor.data_ptr() or not held.is_contiguous() else held
        self._pending_size += size
        self._total_size += size

    def close(self) -> None:
        """Write what is left, and the index if there is more than one file."""
        if self._pending or not self._files:
            self._flush()
        count = len(self._files)
        names = [_NAME] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            (self._folder / _unnumbered(i)).rename(self._folder / name)
        if count > 1:
            weight_map = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total_size}, "weight_map": weight_map}
            (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self._pending.items()}
        self._package.torch.save_file(tensors, self._folder / _unnumbered(len(self._files)), self.metadata)
        self._files.append(list(self._pending))
        self._pending, self._pending_size = {}, 0


def _unnumbered(i: int) -> str:
    """The name of a file as long as the number of files is not known."""
    return f"part-{i}"


class Shards:
    """The tensors in a folder's safetensors files, read when they are requested.

    Args:
        action: The function that reads, for errors.
        folder: The folder.

    Attributes:
        transposed: The names of matrices to return transposed.

    Raises:
        FileError: If a file is malformed, or an index names one that is not in the folder.
        FileNotFoundError: If the folder has no such file, or lacks one that its index names.
    """

    def __init__(self, action: str, folder: Path) -> None:
        self._package, self._action = safetensors(action), action
        self.transposed: Collection[str] = ()
        index = folder / _INDEX
        if index.exists():
            weight_map = read_json(action, index, {"weight_map": {str: str}})["weight_map"]
            paths = [folder / name_in_folder(action, index, name) for name in dict.fromkeys(weight_map.values())]
        else:
            paths = [folder / _NAME]
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f"{action}: there is no {path}")
        self._files = [self._opened(action, path) for path in paths]
        self._of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (not a dictionary)

    def _opened(self, action: str, path: Path) -> Any:
        try:
            return self._package.safe_open(path, framework="pt")
        except (self._package.SafetensorError, OSError, ValueError) as error:
            raise FileError(f"{action}: {path} is malformed: {error}") from error

    @property
    def metadata(self) -> dict[str, str]:
        """The text in the headers of all files."""
        return {key: value for file in self._files for key, value in (file.metadata() or {}).items()}

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def described(self, name: str) -> Tensor:
        """A tensor of the shape and dtype of one in the files, on the meta device; its values are not read."""
        if name not in self._of:
            raise FileError(f"{self._action}: the files have no tensor {name!r}")
        part = self._of[name].get_slice(name)
        shape = part.get_shape()
        dtype = part[:0].dtype if shape else self[name].dtype
        return self._in_order(name, torch.empty(shape, dtype=dtype, device="meta"))

    def matrix(self, name: str, i: int) -> Tensor:
        """A matrix of a stack; no others are read."""
        found: Tensor = self._of[name].get_slice(name)[i]
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self._in_order(name, self._of[name].get_tensor(name))

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.t() if name in self.transposed and tensor.dim() == 2 else tensor
