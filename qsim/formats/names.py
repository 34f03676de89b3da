"""Named formats, and how names, dtypes and formats are resolved to formats."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import lru_cache

import torch

from qsim.formats.base import Format
from qsim.formats.dynamic import Dynamic
from qsim.formats.fixed import Fixed, Int
from qsim.formats.floating import P3109, Float, PowerOfTwo, Specials
from qsim.formats.logarithmic import Log
from qsim.formats.posit import Posit
from qsim.formats.supernormal import Supernormal
from qsim.formats.table import Table
from qsim.formats.takum import Takum
from qsim.text.parsing import read_call

FP64 = Float(11, 52, specials="ieee")
FP32 = Float(8, 23, specials="ieee")
TF32 = Float(8, 10, specials="ieee")
BF16 = Float(8, 7, specials="ieee")
FP16 = Float(5, 10, specials="ieee")
E5M2 = Float(5, 2, specials="ieee")
E4M3 = Float(4, 3, specials="fn")
E5M2FNUZ = Float(5, 2, specials="fnuz")
E4M3FNUZ = Float(4, 3, specials="fnuz")
E4M3B11FNUZ = Float(4, 3, bias=11, specials="fnuz")
E3M4 = Float(3, 4, specials="ieee")
E3M2 = Float(3, 2)
E2M3 = Float(2, 3)
E2M1 = Float(2, 1)
E8M0 = PowerOfTwo(8)
INT8 = Int(8)
INT4 = Int(4)
#: The 4-bit NormalFloat of QLoRA (Dettmers et al., arXiv 2305.14314, appendix E): quantiles of a normal distribution, and zero.
NF4 = Table(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip

#: Every named format by its name, widest first.
NAMED: dict[str, Format] = {
    "fp64": FP64,
    "fp32": FP32,
    "tf32": TF32,
    "bf16": BF16,
    "fp16": FP16,
    "e5m2": E5M2,
    "e4m3": E4M3,
    "e5m2fnuz": E5M2FNUZ,
    "e4m3fnuz": E4M3FNUZ,
    "e4m3b11fnuz": E4M3B11FNUZ,
    "e3m4": E3M4,
    "e3m2": E3M2,
    "e2m3": E2M3,
    "e2m1": E2M1,
    "e8m0": E8M0,
    "int8": INT8,
    "int4": INT4,
}

#: The named formats whose values are in tables.
TABULATED: dict[str, Format] = {
    "posit8": Posit(8),
    "takum8": Takum(8),
    "nf4": NF4,
    "e2m1_sr": Supernormal(2, 1, 8.0),
    "e2m1_sp": Supernormal(2, 1, 5.0),
}

# Other spellings. ml_dtypes' `fn` means "all ones is NaN" for 8-bit formats and "finite only" for narrower ones, as OCP has them.
_ALIASES: dict[str, Format] = {
    "float64": FP64,
    "double": FP64,
    "e11m52": FP64,
    "float32": FP32,
    "float": FP32,
    "bfloat16": BF16,
    "float16": FP16,
    "half": FP16,
    "e2m1fn": E2M1,
    "e2m3fn": E2M3,
    "e3m2fn": E3M2,
    "e8m0fnu": E8M0,
    # Scales of NVIDIA's block formats, as PTX names them: E4M3 without a sign, and with one exponent bit more.
    "ue4m3": Float(4, 3, specials="fn", signed=False),
    "ue5m3": Float(5, 3, specials="fn", signed=False),
    "fp8_e4m3": E4M3,
    "fp8_e5m2": E5M2,
    "float8_e4m3": Float(4, 3, specials="ieee"),
    "float8_e3m4": E3M4,
    "float8_e4m3fn": E4M3,
    "float8_e5m2": E5M2,
    "float8_e4m3fnuz": E4M3FNUZ,
    "float8_e5m2fnuz": E5M2FNUZ,
    "float8_e4m3b11fnuz": E4M3B11FNUZ,
    "float8_e8m0fnu": E8M0,
    "float6_e2m3fn": E2M3,
    "float6_e3m2fn": E3M2,
    "float4_e2m1fn": E2M1,
    "float4_e2m1fn_x2": E2M1,
}

_KNOWN: dict[str, Format] = {**NAMED, **TABULATED, **_ALIASES}

#: Cache of the spellings resolved so far.
_FOUND: dict[str, Format] = dict(_KNOWN)

_DTYPES: dict[torch.dtype, Format] = {
    torch.float64: FP64,
    torch.float32: FP32,
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float8_e5m2: E5M2,
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2fnuz: E5M2FNUZ,
    torch.float8_e4m3fnuz: E4M3FNUZ,
    torch.float8_e8m0fnu: E8M0,
    torch.float4_e2m1fn_x2: E2M1,
    torch.int8: INT8,
    torch.int16: Int(16),
    torch.int32: Int(32),
    torch.uint8: Int(8, signed=False),
    torch.uint16: Int(16, signed=False),
    torch.uint32: Int(32, signed=False),
}

# Possible meanings of names that give only a width.
_FAMILIES = {"fp8": "'e4m3' or 'e5m2'", "fp6": "'e3m2' or 'e2m3'", "fp4": "'e2m1'"}

# Names of block formats, which are built from formats and have no values of their own.
_BLOCKS = re.compile(r"mxfp[468](_e\dm\d)?|mxint8|nvfp4|fp8_(1|128)x128")
# More digits than any format has are no name: Python reads no integers of thousands of digits.
_FLOAT = re.compile(r"e(\d{1,4})m(\d{1,4})(?:b(\d{1,4}))?(ieee|fn|fnuz)?")
# gfloat's names of the formats of P3109; the working group writes binary8p4se.
_P3109 = re.compile(r"(?:p3109_k|binary)(\d{1,4})p(\d{1,4})([su])([ef])")
_INTEGER = re.compile(r"(u?)int(\d{1,4})")
_TAPERED = re.compile(r"(posit|takum)(\d{1,4})")


def format(spec: str | torch.dtype | Format) -> Format:  # noqa: A001 (the word users look for)
    """Resolve a name, a torch dtype or a format to a format.

    A bare `ExMy` that OCP defines means OCP's format; ml_dtypes' names mean ml_dtypes' formats; any other `ExMy` has no special values. A
    bias and the special values can be appended: `e4m3b11fnuz`, `e5m7ieee`. `binary8p4se` is `P3109(8, 4)`: signed, extended. `posit16` is
    the standard's posit, `takum16` a linear takum. A format's `repr` is accepted, too.

    Args:
        spec: For example `"e4m3"`, `"bf16"`, `"int8"`, `torch.float8_e5m2`, `Float(6, 9)`. Names are case-insensitive.

    Raises:
        TypeError: If `spec` has the wrong type.
        ValueError: If no format has that name.

    Example:
        >>> import qsim
        >>> qsim.format("E4M3"), qsim.format("e4m1")
        (Float(4, 3, specials='fn'), Float(4, 1))
    """
    if isinstance(spec, Format):
        if not hasattr(spec, "spelling"):
            raise TypeError(
                f"a format must be a name, a torch dtype or a Float, Fixed, Int, PowerOfTwo or Table, got {type(spec).__name__}, a "
                "subclass of Format without a grid and codes: give values that are not evenly spaced as a Table"
            )
        return spec
    if isinstance(spec, str):
        return _FOUND.get(spec) or _FOUND.setdefault(spec, _by_name(spec))
    if isinstance(spec, torch.dtype):
        if spec not in _DTYPES:
            raise ValueError(f"no format matches {spec}: floats have at most 64 bits, integers 32")
        return _DTYPES[spec]
    raise TypeError(f"a format must be a name, a torch dtype or a Format, got {spec!r}")


def _by_name(spelling: str) -> Format:
    name = spelling.lower()
    # Names and calls are ASCII: other alphabets have digits and letters that look, and would be read, like these.
    found = (_KNOWN.get(name) or _parse(name) or read_call(spelling, _MAKERS)) if spelling.isascii() else None
    if found is None and _BLOCKS.fullmatch(name):
        whole = "a block format, numbers under scales that they share"
        raise ValueError(f"{spelling!r} is {whole}: quantize, encode, Quantizer and FivePoint take its name; qsim.scaling.NAMED holds it")
    if name == "if4":
        raise ValueError(
            "'if4' is no set of values: each of its blocks chooses between 'e2m1' and 'int4' times 6/7; the point qsim.points.IF4() does so"
        )
    if found is None:
        close = [repr(known) for known in difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.5)]
        meant = _FAMILIES.get(name.replace("float", "fp")) or "".join(close)
        hint = f"did you mean {meant}? Names are" if meant else "names are"
        raise ValueError(
            f"unknown format {spelling!r}: {hint} ExMy with 1 ≤ x ≤ 8 and 0 ≤ y ≤ 23, intN and uintN with 1 ≤ N ≤ 32, "
            "and those that `qsim formats` lists"
        )
    return found


_MAKERS: dict[str, Callable[..., Format]] = {"Float": Float, "P3109": P3109, "Fixed": Fixed, "Int": Int, "PowerOfTwo": PowerOfTwo}
_MAKERS |= {"Table": Table, "Posit": Posit, "Takum": Takum, "Log": Log, "Dynamic": Dynamic, "Supernormal": Supernormal}


def _parse(name: str) -> Format | None:
    if found := _FLOAT.fullmatch(name):
        exponent, mantissa = int(found[1]), int(found[2])
        bias = None if found[3] is None else int(found[3])
        specials: Specials = found[4] or "none"  # type: ignore[assignment]
        try:
            return Float(exponent, mantissa, bias, specials)  # type: ignore[arg-type]
        except ValueError:
            return None
    if found := _P3109.fullmatch(name):
        return P3109(int(found[1]), int(found[2]), found[3] == "s", "extended" if found[4] == "e" else "finite")
    if found := _INTEGER.fullmatch(name):
        return Int(int(found[2]), signed=not found[1]) if 1 <= int(found[2]) <= 32 else None
    if (found := _TAPERED.fullmatch(name)) and 2 <= int(found[2]) <= 16:
        return Posit(int(found[2])) if found[1] == "posit" else Takum(int(found[2]))
    return None


def names(fmt: Format) -> list[str]:
    """Every name under which `format` finds a format.

    Example:
        >>> import qsim
        >>> qsim.formats.names(qsim.Int(8))
        ['int8']
    """
    return [name for name, known in _KNOWN.items() if known == fmt]


@lru_cache(maxsize=256)
def name_of(fmt: Format) -> str:
    """Return the first name of a format, or its `repr` if it has none.

    Example:
        >>> import qsim
        >>> qsim.formats.name_of(qsim.format("e4m3")), qsim.formats.name_of(qsim.Float(6, 5))
        ('e4m3', 'Float(6, 5)')
    """
    return next(iter(names(fmt)), repr(fmt))
