"""The steps of optimizers for one weight, in float32, each operation rounded on its own.

Arguments that all functions take:
    factors: The `Factors` of the step.
    inner: What `rounded` needs to know of the format of intermediates.
    how: An `UpdateVariant`, known when code is compiled.
"""

from qsim_kernels.arithmetic.words import divide, larger, rounded, square_root


def decayed(grad, weight, factors, inner, how):
    """The gradient with its sign and scale, and with weight decay that is not decoupled."""
    if how.scaled:
        grad = grad * factors.scale
    if how.maximize:
        grad = -grad
    grad = rounded(grad, inner, how)
    if how.coupled:
        grad = rounded(grad + rounded(weight * factors.decay, inner, how), inner, how)
    return grad


def sgd(grad, first, factors, inner, how):
    """The update of stochastic gradient descent, and the new momentum."""
    if how.moment:
        first = rounded(rounded(first * factors.keep1, inner, how) + rounded(grad * factors.fresh1, inner, how), inner, how)
        if how.nesterov:
            grad = rounded(grad + rounded(first * factors.keep2, inner, how), inner, how)
        else:
            grad = first
    return rounded(grad * factors.rate, inner, how), first


def adam(grad, first, second, largest, factors, inner, how):
    """The update of Adam, the new moments, and the largest second moment so far."""
    first = rounded(rounded(first * factors.keep1, inner, how) + rounded(grad * factors.fresh1, inner, how), inner, how)
    squared = rounded(grad * grad, inner, how)
    second = rounded(rounded(second * factors.keep2, inner, how) + rounded(squared * factors.fresh2, inner, how), inner, how)
    taken = second
    if how.amsgrad:
        largest = larger(largest, second)
        taken = largest
    if how.in_format:
        mean = rounded(divide(first, factors.mean), inner, how)
        spread = rounded(square_root(rounded(divide(taken, factors.root), inner, how)), inner, how)
        change = rounded(divide(rounded(mean * factors.rate, inner, how), rounded(spread + factors.epsilon, inner, how)), inner, how)
    else:
        change = divide(first, square_root(taken) * factors.root + factors.epsilon) * factors.rate
    return change, first, second, largest


def with_decay(change, weight, factors, inner, how):
    """An update with decoupled weight decay."""
    if how.decoupled:
        change = rounded(change + rounded(weight * factors.decay, inner, how), inner, how)
    return change


def compensated(change, lost, inner, how):
    """The summand of Kahan's summation: the update, without the excess of the step before."""
    return rounded(-change - lost, inner, how)


def excess(total, weight, added, inner, how):
    """The excess that rounding added to a weight's sum: the compensation, which the next step takes off."""
    return rounded(total - weight, inner, how) - added
