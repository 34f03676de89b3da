"""Compilers whose graphs tests look at; torch runs the graphs instead of generated code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph, GraphModule


def _runs(found: list[Graph]) -> Callable[..., Any]:
    def run(graph: GraphModule, *given: Any, **options: Any) -> Any:
        found.append(graph.graph)
        return make_boxed_func(graph.forward)

    return run


def inductor(found: list[Graph], **settings: object) -> Any:
    """Inductor with some settings, up to the graphs that it generates code for: forward, then backward."""
    return partial(compile_fx, inner_compile=_runs(found), config_patches=settings)


def another(found: list[Graph]) -> Any:
    """A compiler that is not Inductor but uses AOTAutograd as it does."""
    return aot_autograd(fw_compiler=_runs(found), partition_fn=min_cut_rematerialization_partition)


def operators(call: Callable[..., Any], *given: Tensor, compiler: Callable[..., Any] = inductor) -> list[str]:
    """The operators of the graphs that a compiler gets for a call, forward and backward."""
    graphs: list[Graph] = []
    result = torch.compile(call, fullgraph=True, backend=compiler(graphs))(*given)
    if result.requires_grad:
        result.sum().backward()
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
