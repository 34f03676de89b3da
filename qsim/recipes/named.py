"""Recipes by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence

from qsim.formats import Format, format as resolve_format, name_of
from qsim.functional.callables import CallablePoint
from qsim.recipes.any_format import nearest_everywhere, stochastic_backward, weight_only
from qsim.recipes.five_point import FivePoint
from qsim.recipes.fp4 import four_over_six, fp4_dge, ms_eden, quartet2, tetrajet2
from qsim.recipes.learned import lsq, quest
from qsim.recipes.microscaling import mxfp4, mxfp6, mxfp8, nvfp4, te_nvfp4, ufp4
from qsim.recipes.recipe import Recipe
from qsim.recipes.spec import Spec
from qsim.recipes.whole_tensors import deepseek_v3, fp8_blockwise, fp8_hybrid, hfp8, int8, luq, torchao_rowwise
from qsim.text.columns import aligned
from qsim.text.parsing import read_call

#: Every recipe by its name.
NAMED: dict[str, Callable[..., Recipe]] = {
    function.__name__: function
    for function in (
        fp8_hybrid,
        torchao_rowwise,
        fp8_blockwise,
        deepseek_v3,
        hfp8,
        mxfp8,
        int8,
        mxfp6,
        mxfp4,
        nvfp4,
        te_nvfp4,
        four_over_six,
        quartet2,
        ms_eden,
        tetrajet2,
        ufp4,
        fp4_dge,
        luq,
        quest,
        lsq,
        stochastic_backward,
        weight_only,
        nearest_everywhere,
    )
}
#: Recipes that take many times as long as native training on a CPU, and why.
SLOW_ON_CPU = {
    "deepseek_v3": "tens of times as long as a native one, because every sum is emulated number by number",
    "quartet2": "several times as long as a native one, because each block is rounded to both of two scales",
}
#: Possible meanings of names that give only a width.
_FAMILIES = {"fp8": "fp8_hybrid", "fp4": "mxfp4", "fp6": "mxfp6", "mx": "mxfp8"}
#: The points whose formats are listed.
_LISTED = ("act", "weight", "grad")
_HEADINGS = ("bits", "recipe", f"{', '.join(_LISTED)}: summary")
#: The format in which a recipe for any format is shown.
SHOWN_IN = "e4m3"


def resolve(name: str, format: Spec | None = None) -> Recipe:
    """Return a recipe by its name, or by the call that creates it.

    Args:
        name: For example `"mxfp4"` or `"weight_only('e4m1')"`; a name without arguments may be in capitals. Options that all recipes share
            follow as in Python: `"nvfp4.with_(last=4)"`.
        format: The format for a recipe for any format that is given by name only.

    Raises:
        TypeError: If `name` is not a string, or a recipe does not have an option.
        ValueError: If no recipe has that name, or it lacks its format.

    Example:
        >>> import qsim
        >>> qsim.recipes.resolve("weight_only('e4m1')").points.weight.format
        Float(4, 1)
        >>> qsim.recipes.resolve("nvfp4.with_(first=1, last=4)").first
        1
    """
    if not isinstance(name, str):
        raise TypeError(f"a recipe's name must be a string, got {name!r}")
    recipe, dot, options = name.partition(".with_")
    if dot:
        changed: Recipe | None = read_call(f"with_{options}", {"with_": resolve(recipe, format).with_})
        if changed is None:
            raise ValueError(f"{name!r}: options follow a recipe as in 'nvfp4.with_(first=1, last=4)'")
        return changed
    if name.lower() in NAMED:
        make = NAMED[name.lower()]
        if not needs_format(make):
            return make()
        if format is None:
            raise ValueError(f"the recipe {name} is for any format: say which, as in {name}('e4m3')")
        return make(format)
    try:
        found: Recipe | None = read_call(name, NAMED)
    except TypeError as error:
        raise TypeError(f"{name!r}: {error}. Options of all recipes follow as in 'nvfp4.with_(first=1, last=4)'") from error
    if found is not None:
        return found
    close = [_FAMILIES[name]] if name in _FAMILIES else difflib.get_close_matches(name.partition("(")[0], NAMED, n=1, cutoff=0.8)
    hint = f"did you mean {close[0]!r}? There are" if close else "there are"
    raise ValueError(f"unknown recipe {name!r}: {hint} {', '.join(NAMED)}{_instead(name)}")


def _instead(name: str) -> str:
    """The error text for a format given instead of a recipe: a format does not say where to round."""
    try:
        resolve_format(name)
    except ValueError:
        return ""
    return f". {name!r} is a format: FivePoint(act={name!r}, weight={name!r}) rounds inputs and weights to it"


def listing(width: int | None = None) -> str:
    """A list of all recipes by the bits of their narrowest format: what each rounds inputs, weights and gradients to, and a description.

    Args:
        width: Wrap lines that are longer.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.listing(width=100))  # doctest: +ELLIPSIS
        bits  recipe                      act, weight, grad: summary
        8     fp8_hybrid                  e4m3, e4m3, e5m2: E4M3 for inputs and weights, which need
                                          precision, and E5M2 for gradients, which need range
        ...
    """
    return aligned([_HEADINGS, *(_listed(name, make) for name, make in NAMED.items())], width=width)


def describe(name: str | Recipe | None = None) -> None:
    """Print a recipe's points with formats, scales and roundings, the layers it keeps in high precision, and its source.

    Args:
        name: A recipe, its name, or the call that creates it; a recipe for any format is shown in E4M3. Without a name, all recipes are
            listed.

    Raises:
        ValueError: If no recipe has that name.

    Example:
        >>> import qsim
        >>> qsim.recipes.describe("weight_only('e4m1')")
        weight_only
          point       format          scale  rounding  after
          act         high precision
          weight      Float(4, 1)     -      nearest   -
          act_bwd     high precision
          weight_bwd  same as weight
          grad        high precision
          range without scales: weight from 0.00781 to 384
          high precision: no layer
          source: Training with Fewer Bits, section 3.2
    """
    if name is None:
        print(listing())
    else:
        print((name if isinstance(name, Recipe) else resolve(name, SHOWN_IN)).describe())


def needs_format(make: Callable[..., Recipe]) -> bool:
    """Whether the function that makes a recipe needs a format."""
    return any(parameter.default is parameter.empty for parameter in inspect.signature(make).parameters.values())


def _listed(name: str, make: Callable[..., Recipe]) -> Sequence[str]:
    """A recipe as a row of the list."""
    is_open = needs_format(make)
    points = (make(SHOWN_IN) if is_open else make()).points
    formats = {place: fmt for place in _LISTED if (fmt := _format_at(points, place)) is not None}
    shown = ["any" if is_open and place in formats else name_of(formats[place]) if place in formats else "-" for place in _LISTED]
    bits = "any" if is_open else str(min(fmt.bits for fmt in formats.values()))
    return bits, f"{name}(format)" if is_open else name, f"{', '.join(shown)}: {_summary(make)}"


def _format_at(points: FivePoint, place: str) -> Format | None:
    """The format at a point, if it rounds to one."""
    point = points.used[place]
    rounds = point.function if isinstance(point, CallablePoint) else point
    return getattr(rounds, "format", None)


def _summary(make: Callable[..., Recipe]) -> str:
    assert make.__doc__ is not None
    return make.__doc__.partition("\n")[0].rstrip(".")
