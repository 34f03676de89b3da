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
    >>> import typing
    >>> from qsim import formats
    >>> [fmt.max for fmt in (formats.E5M2FNUZ, formats.E4M3FNUZ, formats.E4M3B11FNUZ)]
    [57344.0, 240.0, 30.0]
    >>> [fmt.max for fmt in (formats.E3M4, formats.E3M2, formats.E2M3)]
    [15.5, 28.0, 7.5]
    >>> [fmt.bits for fmt in (formats.FP64, formats.FP32, formats.TF32, formats.FP16, formats.BF16)]
    [64, 32, 19, 16, 16]
    >>> [fmt.bits for fmt in (formats.E8M0, formats.INT8, formats.INT4, formats.NF4)]
    [8, 8, 4, 4]
    >>> [fmt.bits for fmt in (formats.Posit(8), formats.Takum(8), formats.Log(4, 3))]
    [8, 8, 8]
    >>> formats.Table([0, 1]).bits
    1
    >>> list(formats.TABULATED)
    ['posit8', 'takum8', 'nf4', 'e2m1_sr', 'e2m1_sp']
    >>> formats.Supernormal(2, 1, 8).max
    8.0
    >>> formats.NAMED["e5m2"] == formats.E5M2, typing.get_args(formats.Specials)
    (True, ('ieee', 'fn', 'fnuz', 'p3109', 'none'))
"""

from qsim.formats.base import Format
from qsim.formats.dtypes import contains, holders, holds
from qsim.formats.dynamic import Dynamic
from qsim.formats.fixed import Fixed, Int
from qsim.formats.floating import P3109, Float, PowerOfTwo, Specials
from qsim.formats.logarithmic import Log
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
    FP64,
    INT4,
    INT8,
    NAMED,
    NF4,
    TABULATED,
    TF32,
    format,
    name_of,
    names,
)
from qsim.formats.posit import Posit
from qsim.formats.supernormal import Supernormal
from qsim.formats.table import Table
from qsim.formats.takum import Takum

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
    "FP64",
    "INT4",
    "INT8",
    "Log",
    "NAMED",
    "NF4",
    "P3109",
    "TF32",
    "Dynamic",
    "Fixed",
    "Float",
    "Format",
    "Int",
    "Posit",
    "PowerOfTwo",
    "Specials",
    "Supernormal",
    "TABULATED",
    "Table",
    "Takum",
    "format",
    "contains",
    "holders",
    "holds",
    "name_of",
    "names",
]
