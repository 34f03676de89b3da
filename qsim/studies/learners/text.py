"""Text in tokens, bytes or pairs of them: the sources of Python's standard library, which every machine has, or other files."""

from __future__ import annotations

import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from qsim.studies.learners.byte_pairs import tokenized
from qsim.studies.learners.training import Examples

LIBRARY, PACKAGES = "library", "packages"
VOCABULARY = 256
_HELD_OUT = 0.05
#: Files of packages that are read, and the number of bytes after which no further file is.
_READABLE, _ENOUGH = (".py", ".md", ".rst", ".txt"), 24_000_000


@dataclass(frozen=True)
class Text:
    """A text whose end is held out.

    Attributes:
        tokens: The whole text.
        held_out: The index at which the held-out end begins.
    """

    tokens: Tensor
    held_out: int

    def batch(self, count: int, context: int, generator: torch.Generator) -> Tensor:
        """Training sequences from random positions.

        Args:
            count: The number of sequences.
            context: Their length; each has one more token, because the targets are the following tokens.
            generator: A torch generator on the CPU, which draws the positions.

        Returns:
            Tokens: `count` × (`context` + 1).
        """
        return self._windows(torch.randint(self.held_out - context, (count,), generator=generator), context)

    def validation(self, count: int, context: int) -> Tensor:
        """Evenly spaced sequences of the held-out end; see `batch`."""
        last = len(self.tokens) - context - 1
        return self._windows(torch.linspace(self.held_out, last, count, dtype=torch.float64).long(), context)

    def _windows(self, starts: Tensor, context: int) -> Tensor:
        device = self.tokens.device
        if device.type == "cuda":
            # From pinned memory, the copy does not block.
            starts = starts.pin_memory()
        return self.tokens[starts.to(device, non_blocking=True)[:, None] + torch.arange(context + 1, device=device)]


@dataclass(frozen=True)
class LabelledBytes(Examples):
    """Bytes that a model reads, and those that it is to predict.

    Attributes:
        make: A function that makes a model.
    """

    make: Callable[[], nn.Module]

    def net(self) -> nn.Module:
        """A new model."""
        return self.make()


@lru_cache(maxsize=2)
def text(data: str, context: int, device: torch.device, tokens: int = VOCABULARY) -> Text:
    """The text that the option `--data` names.

    Args:
        data: `"library"`, `"packages"` (sources and texts of installed packages, as many as suffice), a file, or a folder, whose files
            are all read.
        context: The length of sequences; the held-out end is longer.
        device: The device to keep it on.
        tokens: The number of different tokens: 256 for bytes, more for pairs that are learnt from the text.

    Raises:
        ValueError: If the file does not exist or is too short.

    Example:
        >>> import torch
        >>> found = text("library", 64, torch.device("cpu"))
        >>> found.validation(3, 64).shape
        torch.Size([3, 65])
    """
    paths = {LIBRARY: _library, PACKAGES: _packages}.get(data, lambda: _files(Path(data)))()
    # In alphabetical order, the held-out end would be about different things than the rest.
    random.Random(0).shuffle(paths)
    content = bytearray(b"\0".join(_contents(paths, _ENOUGH if data == PACKAGES else sys.maxsize)))
    found = torch.frombuffer(content, dtype=torch.uint8) if tokens == VOCABULARY else torch.from_numpy(tokenized(bytes(content), tokens))
    held_out = int(len(found) * (1 - _HELD_OUT))
    if len(found) - held_out <= context + 1:
        name = "bytes" if tokens == VOCABULARY else "tokens"
        raise ValueError(f"data: {data} has {len(found)} {name}; sequences of {context} need {int((context + 3) / _HELD_OUT)}")
    return Text(found.to(device), held_out)


def _contents(paths: Sequence[Path], enough: int) -> Iterator[bytes]:
    """The contents of files, until they are enough."""
    read = 0
    for path in paths:
        if read < enough:
            content = path.read_bytes()
            read += len(content)
            yield content


def _library() -> list[Path]:
    found = []
    for folder, inner, names in os.walk(sysconfig.get_paths()["stdlib"]):
        # Installed packages are many more files than the library.
        inner[:] = [name for name in inner if name not in ("site-packages", "__pycache__")]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _packages() -> list[Path]:
    found = Path(sysconfig.get_paths()["purelib"]).rglob("*")
    return sorted(path for path in found if path.suffix in _READABLE and path.is_file())


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"data: must be {LIBRARY!r}, {PACKAGES!r}, a file or a folder; {str(path)!r} does not exist")
    return sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]
