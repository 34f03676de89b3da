"""Tensors that compiled code holds in memory, because several kernels read them.

Inductor computes an element again wherever it is read, if that looks cheap. A tensor with one scale is read for the scale, and again to be
rounded; the gradient of a result is rounded in one kernel and summed in another. GELU and its gradient would be computed twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.lowered import inductor
from qsim_kernels.ops.backend import library

library.define("in_memory(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
torch.library.register_fake("qsim::in_memory", lambda x: x.new_empty_strided(x.shape, x.stride()), lib=library)
library.impl("in_memory", lambda x: x.clone(), "CompositeExplicitAutograd")


def in_memory(x: Tensor) -> Tensor:
    """A tensor, and in a graph that Inductor compiles the same tensor in memory."""
    if not inductor.generates(x.device):
        return x
    inductor.learn_to_hold(torch.ops.qsim.in_memory)
    return torch.ops.qsim.in_memory.default(x)  # type: ignore[no-any-return]
