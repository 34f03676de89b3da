"""Command-line settings of measurements, and their parsing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch
from torch import Tensor

import qsim
from qsim.cli.bench._timing import Clock, clock_of
from qsim.formats import Format
from qsim.rounding import Rounding, resolve
from qsim.text import lists

#: The dtypes, by short names from the papers.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

SizeT = TypeVar("SizeT")
_COUNT = re.compile(r"(\d+)(?:(?:\^|\*\*)(\d+))?")


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a measurement.

    Attributes:
        device: The device.
        elements: The number of elements.
        formats: The formats, by the names that were given.
        roundings: The roundings, by name.
        dtypes: Pairs of short names of dtypes: from the first to the second.
        repeats: The number of times each call is timed.
    """

    device: torch.device
    elements: int
    formats: Mapping[str, Format]
    roundings: Mapping[str, Rounding]
    dtypes: Sequence[tuple[str, str]]
    repeats: int

    @property
    def clock(self) -> Clock:
        """The device's clock."""
        return clock_of(self.device)

    def normal(self, dtype: torch.dtype = torch.float32, elements: int | None = None) -> Tensor:
        """Draw normally distributed values, the same in every run."""
        generator = torch.Generator(self.device).manual_seed(0)
        count = self.elements if elements is None else elements
        return torch.randn(count, generator=generator, device=self.device).to(dtype)

    def heading(self) -> str:
        """A line about the machine, the versions and the tensors."""
        return f"{machine(self.device)}; {count_text(self.elements)} elements"


def machine(device: torch.device) -> str:
    """A line about the GPU, or the number of threads of the CPU, and the versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}, triton {triton_version()}, qsim {qsim.__version__}"


def triton_version() -> str:
    """The version of triton, without importing it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "not installed"


def words(text: str, option: str) -> list[str]:
    """The distinct words between commas."""
    found = list(dict.fromkeys(lists.words(text)))
    if not found:
        raise ValueError(f"{option} needs at least one word")
    return found


def among(text: str, option: str, known: Sequence[str]) -> list[str]:
    """The distinct words between commas, all of which must be known."""
    found = words(text, option)
    for word in found:
        if word not in known:
            raise ValueError(f"{option}: {word!r} is not one of {', '.join(known)}")
    return found


def count(text: str, option: str) -> int:
    """A count, such as 4096 or 2^28.

    Example:
        >>> count("2^28", "--elements")
        268435456
    """
    found = _COUNT.fullmatch(text.strip())
    value = int(found[1]) ** int(found[2] or 1) if found else 0
    if value < 1:
        raise ValueError(f"{option}: {text!r} is not a count: write 4096 or 2^28")
    return value


def sizes(text: str, option: str, kind: type[SizeT], example: str) -> list[SizeT]:
    """Sizes between commas, each of as many numbers as a dataclass has fields.

    Example:
        >>> from qsim.cli.bench.linear import LayerShape
        >>> sizes("8x4x2", "--shapes", LayerShape, "8x4x2")
        [LayerShape(tokens=8, inputs=4, outputs=2)]
    """
    found = []
    for word in words(text, option):
        numbers = [int(part) if part.isdecimal() else 0 for part in word.split("x")]
        if len(numbers) != len(fields(kind)) or not all(numbers):  # type: ignore[arg-type]
            raise ValueError(f"{option}: {word!r} is not a {option.removeprefix('--').removesuffix('s')}: write {example}")
        found.append(kind(*numbers))
    return found


def seconds(value: float, option: str) -> float:
    """A duration in seconds."""
    if not 0 < value < math.inf:
        raise ValueError(f"{option}: {value:g} is not a duration: write 0.3")
    return value


def count_text(value: int) -> str:
    """A count as short text.

    Example:
        >>> count_text(4096), count_text(1000)
        ('2^12', '1000')
    """
    return f"2^{value.bit_length() - 1}" if value & (value - 1) == 0 else str(value)


def device(name: str | None) -> torch.device:
    """The device of this name; by default, the GPU if there is one."""
    there = torch.cuda.is_available()
    chosen = name or ("cuda" if there else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise ValueError(f"--device: {chosen!r} is not one of cuda, cpu")
    if chosen == "cuda" and not there:
        raise ValueError("--device: torch finds no CUDA device")
    return torch.device(chosen)


def formats(text: str) -> dict[str, Format]:
    """Formats by their names."""
    return {name: qsim.format(name) for name in words(text, "--formats")}


def roundings(text: str) -> dict[str, Rounding]:
    """Roundings by their names."""
    return {name: resolve(name) for name in words(text, "--roundings")}


def dtype(name: str, option: str) -> torch.dtype:
    """The dtype of a short name."""
    if name not in DTYPES:
        raise ValueError(f"{option}: {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtypes(text: str) -> list[tuple[str, str]]:
    """Pairs of dtypes, from one to another; a single one stands for itself.

    Example:
        >>> dtypes("fp32:bf16,bf16")
        [('fp32', 'bf16'), ('bf16', 'bf16')]
    """
    pairs = []
    for word in words(text, "--dtypes"):
        source, _, target = word.partition(":")
        for name in (source, target or source):
            if name not in DTYPES:
                raise ValueError(f"--dtypes: {name!r} is not one of {', '.join(DTYPES)}; write pairs such as fp32:bf16")
        pairs.append((source, target or source))
    return pairs
