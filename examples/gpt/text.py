"""Text as bytes: each byte is a token of a vocabulary of 256."""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
HELD_OUT = 0.05


def files(names: Sequence[str]) -> list[Path]:
    """The named files and all files in named folders; without names, the sources of Python's standard library."""
    if not names:
        library = Path(sysconfig.get_paths()["stdlib"])
        return sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if not path.exists():
            raise ValueError(f"--text: there is no file or folder {name}")
        found += sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]
    return found


class Text:
    """A text on the device, whose last twentieth is held out.

    Args:
        names: Files and folders; see `files`.
        context: Number of tokens in a sequence.
        device: Where to keep the text.
    """

    def __init__(self, names: Sequence[str], context: int, device: torch.device) -> None:
        paths = files(names)
        # In alphabetical order the held-out end would cover different topics from the rest.
        random.Random(0).shuffle(paths)
        content = bytearray(b"\0".join(path.read_bytes() for path in paths))
        self.context, self.device = context, device
        self.held_out = int(len(content) * (1 - HELD_OUT))
        if len(content) - self.held_out <= context:
            need = int((context + 1) / HELD_OUT)
            raise ValueError(f"--text: {len(paths)} files of {len(content)} bytes in all; --context {context} needs at least {need}")
        self.tokens = torch.frombuffer(content, dtype=torch.uint8).to(device)
        self.files = len(paths)
        self.checksum = zlib.crc32(content)

    def batch(self, count: int, seed: int, step: int) -> Tensor:
        """The sequences of a step, the same in every process: where they begin depends only on the seed and the step."""
        draw = random.Random(f"{seed}/{step}")
        return self._windows([draw.randrange(self.held_out - self.context) for _ in range(count)])

    def validation(self, count: int) -> Tensor:
        """Sequences of the held-out text, spread evenly over it."""
        last = len(self.tokens) - self.context - 1
        return self._windows(torch.linspace(self.held_out, last, count, dtype=torch.float64).long().tolist())

    def _windows(self, starts: list[int]) -> Tensor:
        # One token more than the context, because the targets are the following tokens. Copies from pinned memory are asynchronous.
        begin = torch.tensor(starts, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
        return self.tokens[begin[:, None] + torch.arange(self.context + 1, device=self.device)]
