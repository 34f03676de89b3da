"""One optimizer step in plain torch, one tensor at a time; see `numbers.updates` for the formulas and the order of operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qsim_kernels.meanings.torch import updates as rules
from qsim_kernels.numbers.carrier import rounding_bits
from qsim_kernels.numbers.grid import GridRounding, Mode, Rule
from qsim_kernels.numbers.updates import (
    ROLES,
    Algorithm,
    Factors,
    PlaceNumbers,
    Roundings,
    SGDAlgorithm,
    Step,
    UpdateTensors,
    check_dtypes,
    own_grid,
    power,
    update_variant,
)
from qsim_kernels.torch.chunks import pieces
from qsim_kernels.torch.philox import ElementNoise, block_words
from qsim_kernels.torch.rounding import as_values, float_dtype, one_nan, rounded as rounded_patterns

# Conversions to these dtypes already round to nearest.
_DTYPES = {own_grid(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


def rounded(x: Tensor, rounding: GridRounding, noise: ElementNoise | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Round float32 values onto a grid, in a dtype that holds them; a rule that saturates turns infinities into NaN."""
    grid, rule = rounding
    if rule.mode == Mode.NEAREST and not rule.saturates and grid in _DTYPES:
        return one_nan(x.to(_DTYPES[grid]).to(dtype))
    onto = rounding_bits(*rounding, wide=False)
    if rule.saturates:
        x = x.masked_fill(x.isinf(), math.nan)
    carrier = float_dtype(onto)
    bits = x.to(carrier).view(torch.int64 if carrier == torch.float64 else torch.int32)
    return as_values(rounded_patterns(bits, onto, rule, noise), onto, dtype)


def _store(target: Tensor, x: Tensor) -> None:
    """Write values that a rounding returned."""
    target.copy_(x.view(target.shape))


def as_single(x: Tensor) -> Tensor:
    """The elements as flat float32."""
    return x.reshape(-1).to(torch.float32)


def factors_of(step: int, lr: float, scale: float, products: Tensor | None, algorithm: Algorithm, roundings: Roundings) -> Factors:
    """The numbers of a step, rounded from float64 to float32; in the format's arithmetic also rounded to the format."""
    decay = lr * algorithm.decay if algorithm.decoupled and not roundings.in_format else algorithm.decay
    if isinstance(algorithm, SGDAlgorithm):
        keep, fresh = (algorithm.momentum, 1.0 - algorithm.dampening) if step > 1 else (0.0, 1.0)
        factors = [scale, keep, fresh, algorithm.momentum, 0.0, lr, 0.0, 0.0, 0.0, decay]
    else:
        bias1, bias2 = 1.0 - power(algorithm.beta1, step), 1.0 - power(algorithm.beta2, step)
        rate = lr if roundings.in_format else lr / bias1
        root = 0.0 if roundings.in_format else 1.0 / math.sqrt(bias2)
        of_moments = (algorithm.beta1, 1.0 - algorithm.beta1, algorithm.beta2, 1.0 - algorithm.beta2)
        factors = [scale, *of_moments, rate, root, 0.0, algorithm.epsilon, decay]
    singles = Factors(*torch.tensor(factors, dtype=torch.float64, device="cpu").to(torch.float32).tolist())
    return _in_format(singles, products, algorithm, roundings) if roundings.in_format else singles


def _in_format(factors: Factors, products: Tensor | None, algorithm: Algorithm, roundings: Roundings) -> Factors:
    """The numbers rounded to the format, and those derived from them in its arithmetic."""

    def q(x: float | Tensor) -> float:
        return float(rounded(torch.as_tensor(x, dtype=torch.float32, device="cpu").reshape(1), roundings.inner))

    factors = Factors(factors.scale, *(q(x) for x in factors[1:]))
    if algorithm.decoupled:
        factors = factors._replace(decay=q(_single(factors.rate * factors.decay)))
    if isinstance(algorithm, SGDAlgorithm):
        return factors
    assert products is not None
    for i, beta in enumerate((factors.keep1, factors.keep2)):
        products[i] = q(float(products[i]) * beta)
    mean, root = (q(1.0 - float(product)) for product in products)
    return factors._replace(fresh1=q(1.0 - factors.keep1), fresh2=q(1.0 - factors.keep2), mean=mean, root=root)


def _single(x: float) -> float:
    """Round a float64 to float32, overflowing to infinity."""
    return float(torch.tensor(x, dtype=torch.float64, device="cpu").to(torch.float32))


def _key(seed: int, step: int, stream: int, role: int) -> tuple[int, int]:
    """The seed and the stream of a step's random bits, taken from a block of the optimizer's own bits."""
    words = block_words(step, seed, stream + role)
    return words[0] | words[1] << 32, words[2] | words[3] << 32


def _noise(
    key: Callable[[int], tuple[int, int]], place: PlaceNumbers, index: int, like: Tensor, rule: Rule, role: int
) -> ElementNoise | None:
    """The noise of a piece's elements in a role, if the rule needs any."""
    if rule.mode != Mode.STOCHASTIC:
        return None
    where: int | Tensor = place.offset + index
    if place.row:
        elements = torch.arange(index, index + like.numel(), device=like.device)
        where = place.offset + elements // place.row * place.stride + elements % place.row
    return ElementNoise(*key(role), where, like.numel(), like.device)


def _update_piece(
    x: UpdateTensors,
    factors: Factors,
    noise_of: Callable[[Rule, int], ElementNoise | None],
    algorithm: Algorithm,
    roundings: Roundings,
    rounded: Callable[..., Tensor],
) -> None:
    """Update consecutive elements of one parameter."""
    weight = as_single(x.param)

    def q(value: Tensor) -> Tensor:
        return rounded(value, roundings.inner)

    variant = update_variant(algorithm, roundings.in_format, scaled=True, moment=x.first is not None)
    first, second, largest = (None if state is None else as_single(state) for state in (x.first, x.second, x.largest))
    grad = rules.decayed(as_single(x.grad), weight, factors, q, variant)
    if isinstance(algorithm, SGDAlgorithm):
        change, first = rules.sgd(grad, first, factors, q, variant)
    else:
        change, first, second, largest = rules.adam(grad, first, second, largest, factors, q, variant)
    change, states = rules.with_decay(change, weight, factors, q, variant), (first, second, largest)
    for role, (state, value) in enumerate(zip((x.first, x.second, x.largest), states, strict=True), start=1):
        if state is not None and value is not None:
            # The largest second moment was itself a second moment, so it uses the same random bits.
            noise = noise_of(roundings.state.rule, min(role, ROLES - 1))
            _store(state, rounded(value, roundings.state, noise, state.dtype))
    noise = noise_of(roundings.weights.rule, 0)
    if x.compensation is None:
        _store(x.param, rounded(weight - change, roundings.weights, noise, x.param.dtype))
    else:
        added = rules.compensated(change, as_single(x.compensation), q, variant)
        total = rounded(weight + added, roundings.weights, noise)
        lost = rules.excess(total, weight, added, q, variant)
        _store(x.compensation, rounded(lost, roundings.inner, None, x.compensation.dtype))
        # Last, because the weight is a view of a float32 tensor.
        _store(x.param, one_nan(total.to(x.param.dtype)))


#: A function that updates a whole parameter.
WholeUpdate = Callable[[UpdateTensors, Factors, Callable[[int], tuple[int, int]], PlaceNumbers, Algorithm, Roundings], None]


def update(
    step: Step,
    algorithm: Algorithm,
    roundings: Roundings,
    rounded: Callable[..., Tensor] = rounded,
    update_whole: WholeUpdate | None = None,
) -> None:
    """Update parameters by one step.

    Args:
        step: The inputs and outputs.
        algorithm: How gradients become updates.
        roundings: What is rounded on the way.
        rounded: See `rounded`: this function, or a faster one with the same results.
        update_whole: A faster way to update a whole parameter, in place of this module.
    """
    check_dtypes((step.params, step.grads, *step.changed[1:]))
    if step.found_inf is not None and bool(step.found_inf):
        return
    scale = 1.0 / (1.0 if step.grad_scale is None else float(step.grad_scale))
    of_elements = (step.first, step.second, step.largest, step.compensations)
    for i, param in enumerate(step.params):
        step.steps[i].add_(1)
        done = int(step.steps[i])
        factors = factors_of(done, float(step.lr), scale, step.products[i] if step.products else None, algorithm, roundings)
        key = partial(_key, step.seed, done, step.streams[i])
        tensors = UpdateTensors(param, step.grads[i], *(states[i] if states else None for states in of_elements))
        place = PlaceNumbers(*step.places[3 * i : 3 * i + 3])
        if update_whole is not None:
            update_whole(tensors, factors, key, place, algorithm, roundings)
            continue
        for index, views in pieces(*(x for x in tensors if x is not None)):
            remaining = iter(views)
            piece = UpdateTensors(*(None if x is None else next(remaining) for x in tensors))
            _update_piece(piece, factors, partial(_noise, key, place, index, piece.param), algorithm, roundings, rounded)
