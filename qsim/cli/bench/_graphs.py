"""Steps of training for timing: called from Python, or replayed from a CUDA graph, which excludes Python's time."""

from __future__ import annotations

import torch

from qsim.cli.bench._timing import WARMUP, Call


def replay(step: Call) -> Call:
    """Capture a step in a CUDA graph.

    Args:
        step: Work on tensors that stay in place.

    Returns:
        A function that replays it.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def peak_growth(step: Call) -> int:
    """The bytes that a step allocates at its peak beyond those allocated before it."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
