"""QPyTorch's interface on top of qsim: to run a script that imports `qtorch`, change its imports.

`import qtorch` becomes `from qsim.compat import qtorch`, and `from qtorch.quant import float_quantize` becomes
`from qsim.compat.qtorch.quant import float_quantize`. Modules, names, arguments and defaults are those of QPyTorch 0.3.0; nothing is
compiled at import. Wherever QPyTorch is correct, results are the same. Differences:

====================================== ============================================= ==============================================
feature                                QPyTorch 0.3.0                                here
====================================== ============================================= ==============================================
ties, rounding to nearest              floats away from zero, blocks up, fixed point to even, everywhere
                                       to even on CPU and away on CUDA
NaN in `FloatingPoint`                 becomes the largest number, or -0             stays NaN
infinities in `FloatingPoint`          become the largest number, except `exp=8`     stay infinities; large finite numbers saturate
an infinity in `BlockFloatingPoint`    its block becomes NaN                         the same
subnormals, blocks, fixed point        rounded twice                                 rounded once, exactly
tiny numbers, stochastic rounding      lost below `2**(man-23)` of the smallest      rounded up with the right probability
-0 and tiny negative numbers           become +0                                     keep their sign in `FloatingPoint`
values of the format, stochastic       fixed point sometimes changes one             never changed
values of the format, nearest          fixed point changes odd multiples of steps,   never changed
                                       from `2**23` to `2**24` of them
blocks of 23 bits and more, nearest    signs change, elements become the limit       rounded like any other
blocks of 24 bits and more, stochastic the same                                      rounded like any other
blocks that reach `2**126`             the same                                      rounded like any other
`man=23`                               changes signs                                 leaves float32 unchanged
the top exponent, `exp` up to 7        finite values: E4M3 reaches 480, E5M2 114688  the same: `qsim.Float(exp, man)`
the top exponent, `exp=8` and more     infinities, also by rounding up               infinities and NaN: `FloatingPoint(8, 7)` is
                                                                                     bfloat16, and large finite numbers saturate
`torch.manual_seed`                    no effect on floats and blocks on CPU         makes runs reproducible, equal on all devices
processes with the same weights        round them differently, and diverge           `OptimLP` rounds them the same way
dtypes                                 float32                                       float32, bfloat16, float16, float64, if they
                                                                                     hold the format; otherwise an error
`wl`                                   any; above 25 the limits are rounded          up to 256 in float32 and float64, with limits
                                                                                     rounded in the same way
`exp` of `float_quantize`              any; from 8 on the range is float32's         up to 31, the same; in float64 up to 8
empty tensors                          fail in blocks                                are allowed
strides                                the result is contiguous                      those of the input, except blocks
gradient of `float_quantize` etc.      none: the result is detached                  passes straight through
`clamping_grad_zero`                   only with a `backward_number`                 always
`backward_hooks`                       only with both of these                       always, before `backward_number`
functions of `quantizer`               cannot be pickled                             can be
`sequential_lower`, `lower`            layer types of 2019                           all layers of a type in torch, not subclasses
`lower`                                a copied model runs the original's layers     copies are independent
`OptimLP.step(closure)`                ignores the closure                           calls it
`OptimLP.state_dict`                   without momentum and accumulators             with both, so runs can be resumed
`OptimLP`'s accumulators               copy the weights at construction              copy the weights at the first step
====================================== ============================================= ==============================================

There is no option to restore QPyTorch's results in these cases.

A number's format is an attribute, for use with `qsim`: `qsim.quantize`, `qsim.FivePoint` and `qsim.convert` take
`FloatingPoint(4, 3).format`. Standard formats have names in qsim: `"fp16"`, `"e4m3"` (up to 448), `"e5m2"` (up to 57344), `"bf16"`.

Example:
    >>> import torch
    >>> from qsim.compat import qtorch
    >>> from qsim.compat.qtorch.quant import float_quantize, quantizer
    >>> x = torch.tensor([1.1, 3.0, 1000.0, float("nan")])
    >>> float_quantize(x, exp=4, man=3, rounding="nearest")
    tensor([  1.1250,   3.0000, 480.0000,      nan])
    >>> quantizer(forward_number=qtorch.FixedPoint(wl=8, fl=4), forward_rounding="nearest")(x)
    tensor([1.1250, 3.0000, 7.9375,    nan])
"""

from qsim.compat.qtorch import auto_low, optim, quant
from qsim.compat.qtorch.number import BlockFloatingPoint, FixedPoint, FloatingPoint, Number

__all__ = ["BlockFloatingPoint", "FixedPoint", "FloatingPoint", "Number", "auto_low", "optim", "quant"]
