"""Caches that threads share are bounded and safe: tables of addresses, captured tensors, chips' products, and names of bound modules."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import qsim_kernels
from qsim_kernels.arithmetic import mixing
from qsim_kernels.chip import verified
from qsim_kernels.meanings.binding import bound
from qsim_kernels.torch.recent import Recent
from qsim_kernels.triton.update import multi_tensor


def in_threads(work: Callable[[int], Any], count: int = 3) -> list[Any]:
    """The results of threads that change places as often as Python lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as pool:
            return [*pool.map(work, range(count))]
    finally:
        sys.setswitchinterval(interval)


def table(x: Tensor, steps: Tensor, stream: int) -> multi_tensor.AddressTable:
    return multi_tensor.table_of(([x], [x], [], [], [], [], [steps], []), (x.numel(),), [stream], [0, 0, 0])


def test_threads_find_their_tables() -> None:
    """More of them than are kept: each is dropped while others look it up."""
    x, steps = torch.zeros(8), torch.tensor(0)

    def look_up(thread: int) -> bool:
        found = [(number, table(x, steps, number)) for turn in range(8) for number in range(0, 3 * multi_tensor._KEPT, 3 - thread)]
        return all(int(each.host[0, multi_tensor.STREAM.value]) == number for number, each in found)

    assert in_threads(look_up) == [True] * 3
    assert len(multi_tensor._tables) <= multi_tensor._KEPT


def test_a_table_may_be_dropped_by_another_thread_meanwhile() -> None:
    """Here it is dropped whenever the cache is asked a second time in one call, as between two instructions of a thread."""
    x, steps = torch.zeros(8), torch.tensor(0)

    class Stream(int):
        """A number that lets others into the cache the second time that it is looked up."""

        asked = 0

        def __hash__(self) -> int:
            self.asked += 1
            if self.asked == 2:
                for number in range(1, multi_tensor._KEPT + 1):
                    table(x, steps, 1000 + number)
            return hash(int(self))

    kept = table(x, steps, 7)
    assert table(x, steps, Stream(7)) is kept


def test_threads_share_results() -> None:
    recent: Recent[int, int] = Recent(4)

    def work(thread: int) -> bool:
        for number in range(4000):
            recent.put(number % 9, number % 9)
            if recent.get(number % 5) not in (None, number % 5) or any(key != result for key, result in recent.items()):
                return False
        return len(recent) <= 4

    assert in_threads(work) == [True] * 3


def test_captured_tensors_live_as_long_as_the_parameters() -> None:
    captured = multi_tensor.Captured()
    first, second = torch.zeros(3), torch.zeros(3)
    view = first[1:]
    for parameter in (first, view, second):
        captured.keep(parameter, (torch.zeros(1),))
    assert len(captured) == 3
    del first
    captured.keep(second, ())
    assert len(captured) == 4, "a view keeps the memory"
    del view, parameter
    captured.keep(second, ())
    assert len(captured) == 3


@pytest.mark.parametrize(
    ("role", "wrong", "words"),
    [
        (6, [torch.tensor(0, dtype=torch.int32)], "steps must all be torch.int64, got torch.int32"),
        (7, [torch.ones(2, dtype=torch.float64)], "products must all be torch.float32, got torch.float64"),
        (1, [torch.ones(3), torch.ones(3).half()], "grads must all be torch.float32, got torch.float16"),
    ],
)
def test_tables_are_of_one_dtype(role: int, wrong: list[Tensor], words: str) -> None:
    """Kernels find tensors by address, and would read others as numbers of this one."""
    columns: list[list[Tensor]] = [[torch.zeros(3), torch.zeros(3)], [], [], [], [], [], [], []]
    columns[role] = wrong
    with pytest.raises(TypeError, match=f"update_: {words}"):
        multi_tensor.table_of(columns, (3, 3), [0, 4], [0] * 6)


def test_a_chip_remembers_a_limited_number_of_products() -> None:
    chip = verified.CHIP
    assert isinstance(chip._known, Recent)
    assert isinstance(chip._calls, Recent)
    assert chip._known._size == chip._calls._size == verified._KEPT


def test_bound_modules_have_names_of_their_own() -> None:
    """Whatever is removed meanwhile, and in whichever threads."""
    sys.modules["removed"] = ModuleType("removed")
    first = bound(mixing, {})
    del sys.modules["removed"]
    second = bound(mixing, {})
    assert second.mixed.__module__ != first.mixed.__module__
    made = [each for batch in in_threads(lambda _: [bound(mixing, {}) for _ in range(20)]) for each in batch]
    assert len({each.mixed.__module__ for each in made}) == len(made)
    assert all(sys.modules[each.mixed.__module__].mixed is each.mixed for each in made)


def test_loops_read_records_by_name() -> None:
    """A number's place in memory changes with every field that is added before it."""
    folder = Path(qsim_kernels.__path__[0]) / "numba" / "loops"
    read = {file.name: re.findall(r"(?:longs|ints|doubles)\(\w+\)\[\d+\]", file.read_text()) for file in folder.glob("*.py")}
    assert len(read) > 10
    assert not any(read.values()), read
