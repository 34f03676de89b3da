"""Work captured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A call in a graph that was not replayed yet, and the result, which each replay overwrites."""
    call()  # compiles kernels, which must not happen while a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    torch.cuda.synchronize()  # torch resets the generator's offset on the stream that captured
    return graph, result
