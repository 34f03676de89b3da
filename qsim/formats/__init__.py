"""Number formats: finite sets of values, and the codes that represent them.

A format is a frozen value. All its properties, for users and for kernels, are derived from a few parameters.

Example:
    >>> from qsim.formats import E4M3, Float
    >>> E4M3
    Float(4, 3, specials='fn')
    >>> E4M3.max, E4M3.smallest_normal, E4M3.smallest
    (448.0, 0.015625, 0.001953125)
    >>> Float(3, 0).values()[-3:]
    (4.0, 8.0, 16.0)
"""

from qsim.formats.base import Format
from qsim.formats.dtypes import contains, holders, holds
from qsim.formats.fixed import Fixed, Int
from qsim.formats.floating import Float, PowerOfTwo, Specials
from qsim.formats.names import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E3M4,
    E4M3,
    E4M3B11FNUZ,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FP16,
    FP32,
    INT4,
    INT8,
    NAMED,
    TF32,
    format,
    name_of,
    names,
)

__all__ = [
    "BF16",
    "E2M1",
    "E2M3",
    "E3M2",
    "E3M4",
    "E4M3",
    "E4M3B11FNUZ",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0",
    "FP16",
    "FP32",
    "INT4",
    "INT8",
    "NAMED",
    "TF32",
    "Fixed",
    "Float",
    "Format",
    "Int",
    "PowerOfTwo",
    "Specials",
    "format",
    "contains",
    "holders",
    "holds",
    "name_of",
    "names",
]
