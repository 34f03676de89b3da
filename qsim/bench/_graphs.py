"""Steps of training as they are timed: called from Python, or replayed from a CUDA graph, where Python's time is no part of them."""

from __future__ import annotations

import torch

from qsim.bench._timing import WARMUP, Call


def replay(step: Call) -> Call:
    """Capture a step in a CUDA graph.

    Args:
        step: Work on tensors that stay in place.

    Returns:
        What replays it.
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
    """Bytes that a step needs at its worst moment beyond what is there before it."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
