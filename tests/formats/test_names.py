"""Names of formats: their list, their meaning, and errors for unknown names."""

from __future__ import annotations

import pickle
import re
import warnings

import ml_dtypes
import pytest
import torch

import qsim
from qsim.compat import qtorch
from qsim.formats import BF16, E2M1, E3M4, E4M3, E4M3B11FNUZ, E5M2FNUZ, FP16, FP32, TF32, Float, Format, Int, PowerOfTwo

NAMES = {
    "e4m3": E4M3,
    "E4M3": E4M3,
    "e4m3fn": E4M3,
    "float8_e4m3fn": E4M3,
    "fp8_e4m3": E4M3,
    "FP8_E5M2": Float(5, 2, specials="ieee"),
    "float8_e4m3": Float(4, 3, specials="ieee"),
    "e5m2": Float(5, 2, specials="ieee"),
    "e3m2": Float(3, 2),
    "e2m3": Float(2, 3),
    "e2m1": Float(2, 1),
    "e8m0": PowerOfTwo(8),
    "e8m0fnu": PowerOfTwo(8),
    "ue4m3": Float(4, 3, specials="fn", signed=False),
    "UE5M3": Float(5, 3, specials="fn", signed=False),
    "e3m4": E3M4,
    "float8_e5m2fnuz": E5M2FNUZ,
    "e4m3b11fnuz": E4M3B11FNUZ,
    "float6_e2m3fn": Float(2, 3),
    "float6_e3m2fn": Float(3, 2),
    "float4_e2m1fn": E2M1,
    "bf16": BF16,
    "BFloat16": BF16,
    "fp16": FP16,
    "tf32": TF32,
    "fp32": FP32,
    "int8": Int(8),
    "uint4": Int(4, signed=False),
    "e4m1": Float(4, 1),
    "e8m7": Float(8, 7),
    "e5m10": Float(5, 10),
    "e1m0": Float(1, 0),
    "e5m7ieee": Float(5, 7, specials="ieee"),
}


@pytest.mark.parametrize(("name", "fmt"), NAMES.items())
def test_names(name: str, fmt: Format) -> None:
    assert qsim.format(name) == fmt
    assert qsim.format(fmt) is fmt


def test_every_named_format_finds_its_name() -> None:
    for name, fmt in qsim.formats.NAMED.items():
        assert qsim.format(name) == qsim.format(name.upper()) == fmt
        assert name in qsim.formats.names(fmt)
        assert getattr(qsim.formats, name.upper()) == fmt


@pytest.mark.parametrize(("name", "close"), [("e4m33", "e4m3"), ("bf61", "bf16"), ("float8_e4m3f", "float8_e4m3fn"), ("itn8", "int8")])
def test_unknown_names(name: str, close: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unknown format {name!r}: did you mean {close!r}?")):
        qsim.quantize(torch.ones(3), name)


@pytest.mark.parametrize(("name", "meant"), [("fp8", "'e4m3' or 'e5m2'"), ("FP6", "'e3m2' or 'e2m3'"), ("float4", "'e2m1'")])
def test_names_that_tell_a_width_alone(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unknown format {name!r}: did you mean {meant}? Names are")):
        qsim.format(name)


@pytest.mark.parametrize("name", ["", "e9m3", "e4m24", "e0m3", "int0", "int33", "e4m3 ", "e4_m3", "e1m0ieee"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown format {name!r}: .*ames are ExMy with 1 ≤ x ≤ 8 and 0 ≤ y ≤ 23"):
        qsim.format(name)


@pytest.mark.parametrize(("name", "meant"), [("NF3", "nf4"), ("posit", "posit8"), ("takum", "takum8"), ("posit17", "posit8")])
def test_formats_with_other_sizes(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown format {name!r}: did you mean {meant!r}"):
        qsim.quantize(torch.ones(3), name)


def test_suggestions_are_names_of_the_library_alone() -> None:
    # Independent of other spellings used before.
    qsim.format("e4m9")
    with pytest.raises(ValueError, match="unknown format 'e4m99': did you mean 'e4m3'"):
        qsim.format("e4m99")


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_dtypes_that_are_not_formats(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"no format matches {dtype}"):
        qsim.format(dtype)


@pytest.mark.parametrize("thing", [3, None, 1.5, ("e4m3",), (4, 3), Float, ["e4m3"], {"e4m3"}, {}])
def test_objects_that_are_not_formats(thing: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"a format must be a name, a torch dtype or a Format, got {thing!r}")):
        qsim.format(thing)  # type: ignore[arg-type]


class TestSizesWhoseNameMeansAnotherFormat:
    """`Float(4, 3)` is not `"e4m3"`: it warns once, unless `specials` is given, and prints with `specials`."""

    @pytest.fixture(autouse=True)
    def _not_warned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("qsim.formats.floating._WARNED", set())

    @pytest.mark.parametrize(
        ("size", "name", "top"), [((4, 3), "e4m3", "480"), ((5, 2), "e5m2", "114688"), ((3, 4), "e3m4", "31")], ids=str
    )
    def test_warns_once(self, size: tuple[int, int], name: str, top: str) -> None:
        exact = f"Float{size[0], size[1]}".replace(")", ", specials='none')")
        message = f"Float{size} has no special values and reaches {top}; '{name}' is another format, with special values and up to "
        with pytest.warns(UserWarning, match=re.escape(message)) as warned:
            fmt, _ = Float(*size), Float(*size)
        assert len(warned) == 1
        assert warned[0].filename == __file__
        assert str(warned[0].message).endswith(f"Write '{name}' or {exact}, whichever you mean")
        assert repr(fmt) == exact
        assert qsim.format(exact) == fmt != qsim.format(name)
        assert fmt.specials == "none"
        assert type(fmt.specials) is str

    def test_a_text_warns_at_the_line_that_resolves_it(self) -> None:
        with pytest.warns(UserWarning, match=r"Float\(5, 2\) has no special values") as warned:
            qsim.Quantizer("Float(5, 2)")
        assert warned[0].filename == __file__

    def test_no_warning_where_the_meaning_is_clear(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for fmt in (Float(4, 3, specials="none"), Float(4, 3, bias=9), Float(4, 3, signed=False), Float(5, 2, subnormals=False)):
                assert qsim.format(repr(fmt)) == fmt
            qsim.format("e4m3")
            qtorch.FloatingPoint(exp=4, man=3)
            pickle.loads(pickle.dumps(Float(4, 3, specials="none")))

    def test_a_default_that_is_not_given_is_none_once_made(self) -> None:
        assert Float(4, 1).specials == Float(4, 1, specials="none").specials == "none"


@pytest.mark.parametrize("name", ["e4m3fn", "E4M3FN", "float8_e4m3fn", "fp8_e4m3"])
def test_names_of_ocps_e4m3(name: str) -> None:
    assert qsim.format(name) == qsim.Quantizer(name).format == qsim.FivePoint(name, act_bwd=None).act.format == E4M3


def test_every_name_of_ml_dtypes_and_of_torchs_narrow_dtypes() -> None:
    of_ml_dtypes = [name for name in vars(ml_dtypes) if re.match(r"u?int\d|b?float\d", name)]
    of_torch = [name for name in vars(torch) if re.match(r"float[48]_", name)]
    assert len(of_ml_dtypes) > 10
    assert len(of_torch) > 5
    for name in {*of_ml_dtypes, *of_torch}:
        assert isinstance(qsim.format(name), qsim.formats.Format)
    for name in of_torch:
        assert qsim.format(name) == qsim.format(getattr(torch, name))


@pytest.mark.parametrize(
    "name",
    [
        "e4m\uff13",  # a full-width 3, which is a digit for Python
        "e\u0664m3",  # an Arabic 4
        "int\u0668",
        "posit1\uff16",
        "p3109_\u212a8p3uf",  # the Kelvin sign, in small letters a k
        "\uff26loat(4, 3)",
        "e4m" + "9" * 10_000,
        "int" + "8" * 10_000,
        "-" * 5000 + "1",
        "(" * 5000,
        "Float(4, " + "-" * 5000 + "1)",
        "Float(4, " + "9" * 10_000 + ")",
        "Float(4, \0003)",
    ],
    ids=lambda name: repr(name[:12]),
)
def test_texts_that_look_like_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown format"):
        qsim.format(name)


@pytest.mark.parametrize("call", ["Float(4, mantissa=3, mantissa=2)", "Float(4, **{'mantissa': 3})"])
def test_arguments_are_given_once(call: str) -> None:
    with pytest.raises(
        ValueError, match=f"^{re.escape(repr(call))}: each argument of Float must be given once, by its name or its position$"
    ):
        qsim.format(call)


@pytest.mark.parametrize("argument", ["{[]: 1}", "*[3]", "-" * 500 + "1", "x", "1 + 'a'"])
def test_arguments_are_plain(argument: str) -> None:
    with pytest.raises(ValueError, match="arguments must be plain numbers, strings, True, False or None"):
        qsim.format(f"Float(4, {argument})")
