"""Optimizers for the weight-update step in low precision.

Example:
    >>> import torch, qsim
    >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> optimizer = qsim.optim.SGD([w], lr=2**-12, update="nearest")
    >>> w.grad = torch.ones_like(w)
    >>> optimizer.step()
    >>> w.detach()  # 1 - 2**-12 lies nearer to 1 than to any other number of bfloat16
    tensor([1., 1.], dtype=torch.bfloat16)
"""

from qsim.optim.adam import Adam, AdamW
from qsim.optim.blocks import block_states
from qsim.optim.kahan import Kahan
from qsim.optim.noise import update_noise
from qsim.optim.quantized import Quantized
from qsim.optim.sgd import SGD
from qsim.optim.stochastic import StochasticAdamW, adamw_stochastic_bf16_, copy_fp32_to_bf16_stochastic_

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Kahan",
    "Quantized",
    "StochasticAdamW",
    "adamw_stochastic_bf16_",
    "block_states",
    "copy_fp32_to_bf16_stochastic_",
    "update_noise",
]
