"""Text as bytes, of which each is a token: the sources of Python's standard library, which are on every machine, or files of one's own."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = "library"
VOCABULARY = 256
_HELD_OUT = 0.05


@dataclass(frozen=True)
class Text:
    """A text whose end is held out.

    Attributes:
        tokens: All of it, as bytes.
        held_out: Where the held-out end begins.
    """

    tokens: Tensor
    held_out: int

    def batch(self, count: int, context: int, generator: torch.Generator) -> Tensor:
        """Sequences to learn from, from anywhere.

        Args:
            count: How many.
            context: Their length; there is one token more, for the targets are the tokens that follow.
            generator: Of torch's on the CPU; it says where they begin.

        Returns:
            Bytes: `count` × (`context` + 1).
        """
        return self._windows(torch.randint(self.held_out - context, (count,), generator=generator), context)

    def validation(self, count: int, context: int) -> Tensor:
        """Sequences of the held-out end, evenly spread; see `batch`."""
        last = len(self.tokens) - context - 1
        return self._windows(torch.linspace(self.held_out, last, count, dtype=torch.float64).long(), context)

    def _windows(self, starts: Tensor, context: int) -> Tensor:
        device = self.tokens.device
        if device.type == "cuda":
            # From pinned memory nobody waits for the copy.
            starts = starts.pin_memory()
        return self.tokens[starts.to(device, non_blocking=True)[:, None] + torch.arange(context + 1, device=device)]


@lru_cache(maxsize=2)
def text(data: str, context: int, device: torch.device) -> Text:
    """A text by what the option `--data` names.

    Args:
        data: `"library"`, or a file, or a folder, all files of which are read.
        context: How long sequences will be; the held-out end is longer.
        device: Where to keep it.

    Raises:
        ValueError: If there is no such file, or too little in it.

    Example:
        >>> import torch
        >>> found = text("library", 64, torch.device("cpu"))
        >>> found.validation(3, 64).shape
        torch.Size([3, 65])
    """
    paths = _library() if data == LIBRARY else _files(Path(data))
    # In alphabetical order the held-out end would be about other things than the rest.
    random.Random(0).shuffle(paths)
    content = bytearray(b"\0".join(path.read_bytes() for path in paths))
    held_out = int(len(content) * (1 - _HELD_OUT))
    if len(content) - held_out <= context + 1:
        raise ValueError(f"data: {data} has {len(content)} bytes; sequences of {context} need {int((context + 3) / _HELD_OUT)}")
    return Text(torch.frombuffer(content, dtype=torch.uint8).to(device), held_out)


def _library() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"data: must be {LIBRARY!r}, a file or a folder; there is nothing at {str(path)!r}")
    return sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]
