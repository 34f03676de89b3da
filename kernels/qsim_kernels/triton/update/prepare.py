"""The scalars of one optimizer step: step counts, factors and keys of random bits, computed on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import GridNumbers
from qsim_kernels.numbers.updates import ROLES as _ROLES, Factors
from qsim_kernels.triton.device.noise import words
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.values import as_double, in_carrier
from qsim_kernels.triton.update.multi_tensor import COLUMNS, FACTORS, KEYS, PRODUCTS, STEP, STREAM
from qsim_kernels.triton.update.rules import q

ROLES: tl.constexpr = tl.constexpr(_ROLES)
COUNT: tl.constexpr = tl.constexpr(len(Factors._fields))


@triton.jit
def power(base, exponent):
    """`base**exponent` by squaring; see `qsim_kernels.numbers.updates.power`."""
    result = base * 0 + 1
    for _ in range(40):
        result = tl.where((exponent & 1) == 1, result * base, result)
        base *= base
        exponent >>= 1
    return result


@triton.jit
def store_key(keys, step, seed, stream, role, present):
    """Store the seed and the stream of a step's random bits, taken from a block of the optimizer's own bits."""
    a, b, c, d = words(step, seed + step * 0, stream + role)
    tl.store(keys + 2 * role, (a.to(tl.uint64) | (b.to(tl.uint64) << 32)).to(tl.int64, bitcast=True), mask=present)
    tl.store(keys + 2 * role + 1, (c.to(tl.uint64) | (d.to(tl.uint64) << 32)).to(tl.int64, bitcast=True), mask=present)


@kernel(do_not_specialize_on_alignment=["lr_pointer", "grad_scale", "found_inf"])
def prepare_kernel(
    table, factors, keys, tensors: tl.int64, lr_pointer, lr: tl.int64, grad_scale, found_inf, seed: tl.int64,
    beta1: tl.int64, beta2: tl.int64, epsilon: tl.int64, decay: tl.int64, dampening: tl.int64,
    inner: GridNumbers,
    KIND: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Count the step and write the factors and keys of as many tensors as there are lanes. GridNumbers are passed as their bits."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    present = lane < tensors
    moved = present.to(tl.int64)
    if found_inf is not None:
        moved *= (tl.load(found_inf) == 0).to(tl.int64)
    row = table + lane * COLUMNS
    counter = tl.load(row + STEP, mask=present).to(tl.pointer_type(tl.int64))
    step = tl.load(counter, mask=present, other=0) + moved
    tl.store(counter, step, mask=present)
    for role in tl.static_range(ROLES):
        store_key(keys + lane * KEYS, step, seed, tl.load(row + STREAM, mask=present, other=0), role, present)
    if lr_pointer is not None:
        rate = tl.load(lr_pointer).to(tl.float64)
    else:
        rate = as_double(lr)
    one = tl.full([LANES], 1.0, tl.float64)
    unscale = one
    if grad_scale is not None:
        unscale = one / tl.load(grad_scale).to(tl.float64)
    beta1, beta2 = as_double(beta1), as_double(beta2)
    decay, dampening = as_double(decay), as_double(dampening)
    if KIND.decoupled and not KIND.in_format:
        decay = rate * decay
    root, keep1, fresh1 = one * 0, one * beta1, one - beta1
    if KIND.adam and not KIND.in_format:
        rate = rate / (one - power(one * beta1, step))
        root = one / tl.sqrt(one - power(one * beta2, step))
    elif not KIND.adam:
        keep1, fresh1 = tl.where(step > 1, beta1, 0.0), tl.where(step > 1, one - dampening, 1.0)
        beta2 = beta1
    store_factors(
        factors + lane * FACTORS, present, unscale, keep1, fresh1, beta2 * one, one - beta2, rate * one, root,
        as_double(epsilon) * one, decay * one,
        tl.load(row + PRODUCTS, mask=present).to(tl.pointer_type(tl.float32)), moved > 0,
        in_carrier(inner, KIND.inner.wide), KIND,
    )  # fmt: skip


@triton.jit
def store_factors(
    at, present, unscale, keep1, fresh1, keep2, fresh2, rate, root, epsilon, decay, products, active, inner,
    KIND: tl.constexpr,
):  # fmt: skip
    """Round the factors to float32 and, if arithmetic is in the format, to the format, where products are carried from step to step."""
    keep1, fresh1 = q(keep1.to(tl.float32), inner, KIND), q(fresh1.to(tl.float32), inner, KIND)
    keep2, fresh2 = q(keep2.to(tl.float32), inner, KIND), q(fresh2.to(tl.float32), inner, KIND)
    rate, root = q(rate.to(tl.float32), inner, KIND), root.to(tl.float32)
    epsilon, decay = q(epsilon.to(tl.float32), inner, KIND), q(decay.to(tl.float32), inner, KIND)
    mean = root * 0
    if KIND.in_format:
        if KIND.decoupled:
            decay = q(rate * decay, inner, KIND)
        if KIND.adam:
            fresh1, fresh2 = q(1 - keep1, inner, KIND), q(1 - keep2, inner, KIND)
            product1 = q(tl.load(products, mask=active, other=0) * keep1, inner, KIND)
            product2 = q(tl.load(products + 1, mask=active, other=0) * keep2, inner, KIND)
            tl.store(products, product1, mask=active)
            tl.store(products + 1, product2, mask=active)
            mean, root = q(1 - product1, inner, KIND), q(1 - product2, inner, KIND)
    numbers = Factors(unscale.to(tl.float32), keep1, fresh1, keep2, fresh2, rate, root, mean, epsilon, decay)
    for i in tl.static_range(COUNT):
        tl.store(at + i, numbers[i], mask=present)
