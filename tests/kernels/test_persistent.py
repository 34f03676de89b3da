"""Tensors that stay on a device: they are made outside of the memory of CUDA graphs, and once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from qsim_kernels.chip import library
from qsim_kernels.torch.persistent import persistent

GPU = torch.device("cuda", 0)


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that make tensors, for a GPU as for a CPU."""
    threads: list[threading.Thread] = []
    make = torch.tensor

    def made(numbers: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        threads.append(threading.current_thread())
        time.sleep(0.02)  # so that threads that ask at once all find nothing
        return make(numbers, dtype=dtype)

    monkeypatch.setattr(torch, "tensor", made)
    return threads


def test_another_thread_makes_them_on_a_gpu(makers: list[threading.Thread]) -> None:
    """Torch's CUDA graphs take the memory of the thread that warms them up from a pool that nothing may outlive."""
    assert persistent([3, 4], torch.int32, GPU).tolist() == [3, 4]
    assert persistent(2.5, torch.float32, torch.device("cpu")).item() == 2.5
    assert [thread is threading.current_thread() for thread in makers] == [False, True]


def test_threads_that_ask_first_get_the_same_one(makers: list[threading.Thread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the memory of one would be free while a kernel that was launched with it runs."""
    monkeypatch.setattr(library, "_ones", {})
    started = threading.Barrier(4)

    def ask(_: int) -> Tensor:
        started.wait()
        return library.one_on(GPU)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(4)))
    assert len(makers) == 4
    assert len({id(one) for one in found}) == 1
