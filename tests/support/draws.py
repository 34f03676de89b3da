"""Random bits as they are drawn: which numbers take which bits, recorded where plain torch computes them.

Every operator has an implementation in plain torch, to which all others are equal bit for bit. While a `Recorder` records, CPUs use it; it
keeps, for each random integer by its seed, stream and index, which number was rounded with it, and onto which grid. Two numbers must not
share one. The same number may be rounded again with its own, as a layer does in the backward pass: it gives the same result. A number that
is on the grid already depends on no bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qsim.random import seeds
from qsim_kernels import torch as plain
from qsim_kernels.ops.backend import library
from qsim_kernels.torch import philox, sums, updates

WORD = (1 << 64) - 1
#: Seed, stream and index of a random integer.
Place = tuple[int, int, int]


class Use(NamedTuple):
    """The use of a random integer: the operator, the number, and the grid and the rule by which it was rounded."""

    operator: str
    number: float
    onto: str


class Recorder(TorchDispatchMode):
    """Records the draws of all operators while it is active.

    Attributes:
        uses: What each random integer was drawn for.
        shared: Pairs of different uses of one random integer.
        drew: The operators that drew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[Place, Use] = {}
        self.shared: list[tuple[Place, Use, Use]] = []
        self.drew: set[str] = set()
        self._operator, self._is_rounding = "", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "qsim":
            return func(*args, **(kwargs or {}))
        self._operator = func._schema.name.removeprefix("qsim::")
        result = func(*args, **(kwargs or {}))
        self._operator = ""
        return result

    def add(self, uses: dict[Place, Use]) -> None:
        """Take in draws, also those of another process."""
        for place, use in uses.items():
            known = self.uses.setdefault(place, use)
            if known[1:] != use[1:]:
                self.shared.append((place, known, use))

    def check(self, may_be_empty: bool = False) -> None:
        """Raise an error if different numbers share a random integer, or if none was drawn."""
        assert self.uses or may_be_empty, "nothing was drawn"
        if self.shared:
            place, one, other = self.shared[0]
            uses = f"{one.operator} of {one.number} and {other.operator} of {other.number}"
            raise AssertionError(f"{len(self.shared)} random integers are shared, the first by {uses}, at seed, stream and index {place}")

    def rounded(self, original: Callable[..., Tensor], bits: Tensor, grid: Any, rule: Any, noise: Any) -> Tensor:
        """Round as the original does, and record the random integers of numbers that are not on the grid."""
        self._is_rounding = True
        result = original(bits, grid, rule, noise)
        self._is_rounding = False
        if noise is None:
            return result
        self.drew.add(self._operator)
        floats = torch.float64 if bits.dtype == torch.int64 else torch.float32
        numbers = bits.view(floats).double().tolist()
        where = noise.where if isinstance(noise.where, Tensor) else torch.arange(noise.where, noise.where + bits.numel())
        moved = (result != bits).tolist()
        place = int(noise.seed) & WORD, noise.stream & WORD
        onto = f"{grid._replace(writes_codes=False)} {rule}"
        self.add(
            {
                (*place, index): Use(self._operator, number, onto)
                for index, number, moves in zip(where.tolist(), numbers, moved, strict=True)
                if moves
            }
        )
        return result

    def words(self, original: Callable[..., Any], *arguments: Any) -> Any:
        """Philox's words, which nothing but roundings may take."""
        assert self._is_rounding, f"{self._operator or 'a function'} draws random bits that are not recorded"
        return original(*arguments)

    def block(self, original: Callable[..., Any], number: int, seed: int, stream: int) -> Any:
        """A block of an optimizer's own bits, from which it takes the seed and the stream of a step."""
        places = ((seed & WORD, stream & WORD, 8 * number + index) for index in range(8))
        self.add(dict.fromkeys(places, Use(self._operator, float(number), "a seed and a stream")))
        return original(number, seed, stream)


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Record all draws in a block, and let plain torch compute on CPUs."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch, recorder:
        for module, name, record in (
            (plain, "rounded", recorder.rounded),
            (sums, "rounded", recorder.rounded),
            (updates, "rounded_patterns", recorder.rounded),
            (updates, "block_words", recorder.block),
            (philox, "_words", recorder.words),
        ):
            patch.setattr(module, name, partial(record, getattr(module, name)))
        for name in library.on_backends:
            on_backend = library.implementation(name, "CPU").__self__
            if on_backend._otherwise is not None:
                patch.setitem(vars(on_backend), "_backend", importlib.import_module(on_backend._otherwise))
        yield recorder


@contextmanager
def seeded_alike() -> Iterator[None]:
    """Draw every seed from torch's generator in the same state: only streams tell draws apart."""
    draw = seeds.drawn

    def first_draw(*given: Any, **options: Any) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return draw(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seeds, "drawn", first_draw)
        yield


def drawing_operators() -> set[str]:
    """The operators with a seed and a stream."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        library_name, _, name = schema.name.partition("::")
        arguments = {each.name for each in schema.arguments}
        if library_name == "qsim" and "seed" in arguments and arguments & {"stream", "streams"}:
            found.add(name)
    return found
