"""QPyTorch's interface over qsim: a script that imports `qtorch` runs after its imports are changed.

`import qtorch` becomes `from qsim.compat import qtorch`, and `from qtorch.quant import float_quantize` becomes
`from qsim.compat.qtorch.quant import float_quantize`. Modules, names, arguments and defaults are those of QPyTorch 0.3.0; nothing is
compiled at import. Wherever QPyTorch is right the numbers are the same. What is otherwise:

====================================== ============================================= ==============================================
matter                                 QPyTorch 0.3.0                                here
====================================== ============================================= ==============================================
ties, rounding to nearest              floats away from zero, blocks up, fixed point to even, everywhere
                                       to even on CPU and away on CUDA
NaN in `FloatingPoint`                 becomes the largest number, or -0             stays NaN
infinities in `FloatingPoint`          become the largest number, but for `exp=8`    stay infinities; large finite numbers saturate
an infinity in `BlockFloatingPoint`    its block becomes NaN                         the same
subnormals, blocks, fixed point        rounded twice                                 rounded once, exactly
tiny numbers, stochastic rounding      lost below `2**(man-23)` of the smallest      rounded up as often as their size says
-0 and tiny negative numbers           become +0                                     keep their sign in `FloatingPoint`
values of the format, stochastic       fixed point moves one now and then            never moved
values of the format, nearest          fixed point moves odd multiples of the step,  never moved
                                       from `2**23` to `2**24` of them
blocks of 23 bits and more, nearest    signs change, elements become the limit       rounded like any other
blocks of 24 bits and more, stochastic the same                                      rounded like any other
blocks that reach `2**126`             the same                                      rounded like any other
`man=23`                               changes signs                                 leaves float32 as it is
the top exponent, `exp` up to 7        finite values: E4M3 reaches 480, E5M2 114688  the same: `qsim.Float(exp, man)`
the top exponent, `exp=8` and more     infinities, and what rounds up to one         infinities and NaN: `FloatingPoint(8, 7)` is
                                                                                     bfloat16, and large finite numbers saturate
`torch.manual_seed`                    without effect on floats and blocks on CPU    makes a run reproducible, alike on all devices
processes that hold the same weights   round them differently, and drift apart       `OptimLP` rounds them alike
dtypes                                 float32                                       float32, bfloat16, float16, float64, where they
                                                                                     hold the format; else an error says which do
`wl`                                   any; beyond 25 the limits are rounded         up to 256 in float32 and float64, with limits
                                                                                     rounded in the same way
`exp` of `float_quantize`              any; from 8 on the range is float32's         up to 31, the same; in float64 up to 8
empty tensors                          fail in blocks                                are fine
strides                                the result is contiguous                      those of the input, but for blocks
gradient of `float_quantize` and co.   none: the result is cut from the graph        passes straight through
`clamping_grad_zero`                   not without a `backward_number`               always
`backward_hooks`                       only with both of these                       always, before `backward_number`
functions of `quantizer`               cannot be pickled                             can be
`sequential_lower`, `lower`            kinds of layers of 2019                       all of torch's of that kind; not their subclasses
`lower`                                a copied model runs the layers of the first   a copy is a copy
`OptimLP.step(closure)`                ignores the closure                           calls it
`OptimLP.state_dict`                   without momentum and accumulators             with both: a run can be resumed
`OptimLP`'s accumulators               copies of the weights when it was made        when it first steps
====================================== ============================================= ==============================================

There is no switch that brings the old numbers back.

A number has its format as an attribute, for use with `qsim`: `FloatingPoint(4, 3).format` is what `qsim.quantize`, `qsim.FivePoint` and
`qsim.convert` take. Formats of a standard have names there: `"fp16"`, `"e4m3"` (up to 448), `"e5m2"` (up to 57344), `"bf16"`.

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
