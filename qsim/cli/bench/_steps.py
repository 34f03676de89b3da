"""Steps of training for timing: called from Python, or replayed from a CUDA graph, which excludes Python's time; and their memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qsim.cli.bench._timing import WARMUP, Call


def forward_and_backward(model: nn.Module, x: Tensor, upstream: Tensor, *others: Any, call: Any = None) -> Call:
    """A forward and backward pass, with all gradients recomputed.

    Args:
        model: The model.
        x: Its first input, which gets a gradient, too.
        upstream: The gradient of its result.
        *others: Its other inputs.
        call: What is called in its place, such as a compiled one.
    """
    given = x.detach().requires_grad_()

    def step() -> None:
        for leaf in (given, *model.parameters()):
            leaf.grad = None
        (call or model)(given, *others).backward(upstream)

    return step


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
