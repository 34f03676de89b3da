"""Solutions of the notebook on rounding by hand."""


def magnitudes(exponent, mantissa, bias):
    """All magnitudes of a format with this many exponent and mantissa bits, and this bias."""
    subnormal = [m / 2**mantissa * 2.0 ** (1 - bias) for m in range(2**mantissa)]
    normal = [
        (1 + m / 2**mantissa) * 2.0 ** (e - bias)
        for e in range(1, 2**exponent)
        for m in range(2**mantissa)
    ]
    return subnormal + normal


def round_to_nearest(x, values):
    """The number nearest to x, where `values` are the magnitudes of a format in ascending order."""
    place = min(range(len(values)), key=lambda i: (abs(values[i] - abs(x)), i % 2))
    return values[place] if x >= 0 else -values[place]


def largest_relative_error(mantissa):
    """The largest relative error of round-to-nearest with this many mantissa bits."""
    half = 2.0**-mantissa / 2
    return half / (1 + half)
