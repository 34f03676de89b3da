"""Options of measurements: one table of those that several have, and the values that their texts stand for."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

import qsim
from qsim import recipes
from qsim.cli.bench._timing import Clock, clock_of
from qsim.cli.text import words
from qsim.rounding import resolve

#: The dtypes, by short names from the papers.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

SizeT = TypeVar("SizeT")
_COUNT = re.compile(r"(\d+)(?:(?:\^|\*\*)(\d+))?")


class BenchSettings(SimpleNamespace):
    """The values of a measurement's options, by their names, such as `elements` and `repeats`."""

    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def clock(self) -> Clock:
        """The device's clock."""
        return clock_of(self.device)

    def normal(self, dtype: torch.dtype = torch.float32, elements: int | None = None) -> Tensor:
        """Draw normally distributed values, the same in every run."""
        generator = torch.Generator(self.device).manual_seed(0)
        count = self.elements if elements is None else elements
        return torch.randn(count, generator=generator, device=self.device).to(dtype)

    def heading(self, about: object = "") -> str:
        """A line about the machine, the versions, and what is measured: by default, the number of elements."""
        return f"{machine(self.device)}; {about or f'{count_text(self.elements)} elements'}"


@dataclass(frozen=True)
class BenchOption:
    """An option of the command line.

    Attributes:
        metavar: The name of its text in help; empty: a flag without a text.
        help: Its description.
        read: The value that its text stands for; the second argument is the option, for errors.
        default: Its text by default; two of them: on a GPU and on the CPU.
        bare: The text that the option stands for where none follows it, if it may be alone.
    """

    metavar: str
    help: str
    read: Callable[[str, str], Any] = lambda text, option: text
    default: str | tuple[str, str] | None = None
    bare: str | None = None

    def add(self, parser: argparse.ArgumentParser, flag: str) -> None:
        """Add the option to a parser."""
        if not self.metavar:
            parser.add_argument(flag, action="store_true", help=self.help)
            return
        default = self.default if isinstance(self.default, str) else "; on the CPU ".join(self.default or ())
        shown = f"{self.help} (default: {default})".lstrip() if default else self.help
        alone: dict[str, Any] = {} if self.bare is None else {"nargs": "?", "const": self.bare}
        parser.add_argument(flag, metavar=self.metavar, help=shown, **alone)

    def value(self, given: Any, flag: str, *, on_gpu: bool) -> Any:
        """The value of what was given, or of the default."""
        if given is None:
            given = self.default[not on_gpu] if isinstance(self.default, tuple) else self.default
        return self.read(given, flag) if isinstance(given, str) else given


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, BenchOption]) -> None:
    """Add a measurement's options, `--device` and `--json` to its parser."""
    for name, option in {**options, "device": _DEVICE}.items():
        option.add(parser, _flag(name))
    parser.add_argument("--json", action="store_true", help="print JSON")


def read_options(args: argparse.Namespace, options: Mapping[str, BenchOption]) -> BenchSettings:
    """The values of a measurement's options."""
    where = device(args.device, "--device")
    on_gpu = where.type == "cuda"
    found = {name: option.value(getattr(args, name), _flag(name), on_gpu=on_gpu) for name, option in options.items()}
    return BenchSettings(device=where, **found)


def shared(**defaults: str | tuple[str, str] | None) -> dict[str, BenchOption]:
    """Options that several measurements have, with the defaults of one of them."""
    return {name: replace(_SHARED[name], default=default) for name, default in defaults.items()}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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


def one_of(known: Iterable[str]) -> Callable[[str, str], str]:
    """A reader of a word, which must be known."""

    def read(text: str, option: str) -> str:
        if text not in known:
            raise ValueError(f"{option}: {text!r} is not one of {', '.join(known)}")
        return text

    return read


def among(known: Iterable[str]) -> Callable[[str, str], list[str]]:
    """A reader of the distinct words between commas, all of which must be known."""
    return lambda text, option: [one_of(known)(word, option) for word in words(text, option)]


def mapped(resolve: Callable[[str], Any]) -> Callable[[str, str], dict[str, Any]]:
    """A reader of names between commas, and of what each stands for."""
    return lambda text, option: {word: resolve(word) for word in words(text, option)}


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


def number_of(things: str, example: int) -> Callable[[str, str], int]:
    """A reader of a number of things, of which there must be one."""

    def read(text: str, option: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{option}: {text} is not a number of {things}: write {example}")
        return int(text)

    return read


def sizes(kind: type[SizeT], example: str) -> Callable[[str, str], list[SizeT]]:
    """A reader of sizes between commas, each of as many numbers as a dataclass has fields.

    Example:
        >>> from qsim.cli.bench.linear import LayerShape
        >>> sizes(LayerShape, "8x4x2")("8x4x2", "--shapes")
        [LayerShape(tokens=8, inputs=4, outputs=2)]
    """

    def read(text: str, option: str) -> list[SizeT]:
        found = []
        for word in words(text, option):
            numbers = [int(part) if part.isdecimal() else 0 for part in word.split("x")]
            if len(numbers) != len(fields(kind)) or not all(numbers):  # type: ignore[arg-type]
                raise ValueError(f"{option}: {word!r} is not a {option.removeprefix('--').removesuffix('s')}: write {example}")
            found.append(kind(*numbers))
        return found

    return read


def seconds(text: str, option: str) -> float:
    """A duration in seconds.

    Example:
        >>> seconds("0.3", "--seconds")
        0.3
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{option}: {text} is not a duration: write 0.3")
    return value


def count_text(value: int) -> str:
    """A count as short text.

    Example:
        >>> count_text(4096), count_text(1000)
        ('2^12', '1000')
    """
    return f"2^{value.bit_length() - 1}" if value & (value - 1) == 0 else str(value)


def device(name: str | None, option: str) -> torch.device:
    """The device of this name; by default, the GPU if there is one."""
    there = torch.cuda.is_available()
    chosen = one_of(("cuda", "cpu"))(name or ("cuda" if there else "cpu"), option)
    if chosen == "cuda" and not there:
        raise ValueError(f"{option}: torch finds no CUDA device")
    return torch.device(chosen)


def dtypes(text: str, option: str) -> list[tuple[str, str]]:
    """Pairs of dtypes, from one to another; a single one stands for itself.

    Example:
        >>> dtypes("fp32:bf16,bf16", "--dtypes")
        [('fp32', 'bf16'), ('bf16', 'bf16')]
    """
    pairs = [(source, target or source) for source, _, target in (word.partition(":") for word in words(text, option))]
    for name in (name for pair in pairs for name in pair):
        if name not in DTYPES:
            raise ValueError(f"{option}: {name!r} is not one of {', '.join(DTYPES)}; write pairs such as fp32:bf16")
    return pairs


_DEVICE = BenchOption("NAME", "cuda or cpu (default: cuda if available)", one_of(("cuda", "cpu")))
_SHARED = {
    "elements": BenchOption("N", "such as 4096 or 2^27", count),
    "formats": BenchOption("A,B", "", mapped(qsim.format)),
    "roundings": BenchOption("A,B", "", mapped(resolve)),
    "dtypes": BenchOption("FROM:TO,…", "", dtypes),
    "repeats": BenchOption("N", "number of times each call is timed", count),
    "dtype": BenchOption("NAME", f"dtype of the model: {', '.join(DTYPES)}", lambda text, option: DTYPES[one_of(DTYPES)(text, option)]),
    "format": BenchOption("NAME", "the format of all five points"),
    "backward": BenchOption(
        "NAME", "rounding of the backward points, or same: the forward pass's operands, and a gradient that is rounded to nearest"
    ),
    "accumulate": BenchOption("NAME", "the accumulator of all products; see qsim accumulators (default: none)"),
    "recipe": BenchOption("NAME", f"the points of a recipe instead: {', '.join(recipes.NAMED)}"),
    "seconds": BenchOption("S", "duration of each of three turns in seconds", seconds),
}
