"""`qsim` on the command line."""

import argparse
import json
import re
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

import qsim
from qsim.cli import main
from qsim.cli.exact import neighbours, parse, round_to_odd
from qsim.formats import NAMED, TABULATED, floating


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def inspect(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    return json.loads(run(capsys, "inspect", *words, "--json"))["values"]


# formats


def test_formats_lists_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    single, blocks = (part.splitlines() for part in run(capsys, "formats").split("\n\n"))
    assert single[0].split()[:3] == ["name", "format", "bits"]
    assert [line.split()[0] for line in single[1:]] == [*NAMED, *TABULATED]
    assert any(line.split()[0] == "e4m3" and " 448 " in line for line in single)
    assert [line.split()[0] for line in blocks[1:]] == list(qsim.scaling.NAMED)
    assert any(line.split()[0] == "nvfp4" and line.endswith(" 4.5") for line in blocks)


def test_each_number_of_a_format_is_under_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    heading, *rows = (re.split(r"\s{2,}", line.strip()) for line in run(capsys, "formats").split("\n\n")[0].splitlines())
    (row,) = [row for row in rows if row[0] == "e5m2"]
    assert dict(zip(heading, row, strict=True)) == {
        "name": "e5m2",
        "format": "Float(5, 2, specials='ieee')",
        "bits": "8",
        "max": "57344",
        "smallest normal": "6.103516e-05",
        "smallest": "1.525879e-05",
        "epsilon": "0.25",
        "specials": "inf, NaN",
    }


def test_formats_as_json_give_back_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "formats", "--json"))
    scope = {
        name: getattr(qsim.formats, name) for name in ("Float", "Fixed", "Int", "PowerOfTwo", "Table", "Posit", "Takum", "Supernormal")
    }
    single = {name: entry for name, entry in found.items() if "element" not in entry}
    assert {name: eval(entry["format"], scope) for name, entry in single.items()} == NAMED | TABULATED
    assert all(entry["max"] == (NAMED | TABULATED)[name].max for name, entry in single.items())
    blocks = {name: qsim.scaling.block_formats.resolve(entry["format"]) for name, entry in found.items() if "element" in entry}
    assert blocks == qsim.scaling.NAMED
    assert all(found[name]["bits"] == block.bits for name, block in blocks.items())


def test_one_format_shows_its_facts_and_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "formats", "E2M1")
    assert text.startswith(qsim.format("e2m1").describe())
    assert "0x8   -0  -0.5  -1  -1.5  -2  -3  -4  -6" in text


def test_warnings_are_one_line_without_python(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floating, "_WARNED", set())
    main(["formats", "Float(4,3)"])
    assert re.fullmatch(r"qsim: warning: Float\(4, 3\) has no special values .*, whichever you mean\n", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["MXFP4", "Block('e2m1', 32)"])
def test_a_block_format_shows_its_parts(capsys: pytest.CaptureFixture[str], name: str) -> None:
    lines = run(capsys, "formats", name).splitlines()
    assert "\n".join(lines[:4]) == qsim.scaling.MXFP4.describe()
    assert lines[4:] == ["  names            mxfp4, mxfp4_e2m1", "", "qsim formats e2m1 shows the elements' values"]
    assert json.loads(run(capsys, "formats", name, "--json"))["element"] == "e2m1"


@pytest.mark.parametrize("name", [name for name, fmt in NAMED.items() if fmt.bits <= 8])
def test_values_by_code_are_those_of_the_format(capsys: pytest.CaptureFixture[str], name: str) -> None:
    fmt = NAMED[name]
    values = [float(value) for value in json.loads(run(capsys, "formats", name, "--json"))["values"]]
    assert len(values) == 2**fmt.bits
    assert {value for value in values if abs(value) < float("inf")} == set(fmt.values())
    assert any(value != value for value in values) == fmt.has_nan
    assert (float("inf") in values) == fmt.has_inf


def test_wide_formats_have_no_chart(capsys: pytest.CaptureFixture[str]) -> None:
    assert "0x" not in run(capsys, "formats", "bf16")
    assert json.loads(run(capsys, "formats", "bf16", "--json"))["values"] is None


# inspect


def test_inspect_shows_neighbours_position_and_codes(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "inspect", "e4m3", "0.3")
    assert "below     0.28125  0|0101|001  0x29" in text
    assert "above     0.3125   0|0101|010  0x2a" in text
    assert "position  3/5 = 0.6 of the way from 0.28125 to 0.3125" in text


@pytest.mark.parametrize("words", [("-0.3",), ("--", "-0.3"), ("-3/10",), ("-3e-1",), ("-.3",)])
def test_negative_numbers_need_no_quoting(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    # Options come first, because everything after -- is a value.
    found = json.loads(run(capsys, "inspect", "e4m3", "--json", *words))["values"][0]
    assert (found["below"]["value"], found["above"]["value"], found["position"]) == (-0.3125, -0.28125, "3/5")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m1", "bf16", "int8", "e4m3fnuz"])
@pytest.mark.parametrize("value", ["0.3", "-0.3", "1/3", "-2.5", "3", "0x1.8p-7", "1e-9", "-0.0"])
def test_roundings_are_those_of_the_library(capsys: pytest.CaptureFixture[str], name: str, value: str) -> None:
    (found,) = inspect(capsys, name, value)
    x = torch.tensor(parse(value).carrier, dtype=torch.float64)
    for overflow, rounded in found["rounded"].items():
        assert set(rounded) == set(qsim.rounding.NAMED) - {"stochastic"}
        for rounding, entry in rounded.items():
            expected = qsim.quantize(x, name, rounding=rounding, overflow=overflow)
            assert repr(float(entry["value"])) == repr(expected.item())
            assert entry["code"] == int(entry["binary"].replace("|", ""), 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("value", ["0.3", "-0.3", "1.2", "-5.1", "0.1"])
@pytest.mark.parametrize("bits", [1, 3, 6])
def test_probabilities_are_those_that_the_library_reaches(capsys: pytest.CaptureFixture[str], value: str, bits: int) -> None:
    count = 5000
    drawn = qsim.random.random_bits(count, bits, seed=7)
    x = torch.full((count,), parse(value).carrier, dtype=torch.float64)
    for entry in inspect(capsys, "e2m1", value, "--bits", str(bits))[0]["stochastic"]:
        if entry["bits"] != bits:
            continue
        rounding = qsim.Stochastic(bits=bits, correction=entry["correction"])
        outer = qsim.quantize(x, "e2m1", rounding=rounding, seed=7) == entry["outer"]
        threshold = 2**bits - Fraction(entry["probability_of_outer"]) * 2**bits
        assert torch.equal(outer, drawn >= int(threshold))


def test_few_bits_and_their_correction(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = inspect(capsys, "e2m1", "0.6", "--bits", "3")
    odds = {(entry["bits"], entry["correction"]): entry["probability_of_outer"] for entry in found["stochastic"]}
    # p = 1/5: floor(8/5) = 1, floor(8/5 + 1/2) = 2.
    assert odds == {(32, False): "858993459/4294967296", (3, False): "1/8", (3, True): "1/4"}


def test_overflow_shows_both_modes(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "inspect", "e5m2", "1e9", "--rounding", "nearest")
    assert "above     none   beyond the largest value" in text
    assert "saturate" in text
    assert "nonfinite" in text
    assert "0|11111|00  0x7c" in text


def test_special_values(capsys: pytest.CaptureFixture[str]) -> None:
    nan, infinity, zero, exact = inspect(capsys, "e4m3", "nan", "-inf", "-0.0", "448")
    assert nan["rounded"]["saturate"]["nearest"] == {"value": "nan", "code": 0x7F, "binary": "0|1111|111"}
    assert infinity["rounded"]["saturate"]["nearest"]["value"] == -448.0
    assert infinity["rounded"]["nonfinite"]["nearest"]["value"] == "nan"
    assert zero["rounded"]["saturate"]["up"]["binary"] == "1|0000|000"
    assert (exact["position"], exact["below"]) == ("0", exact["above"])
    assert "a value of the format" in run(capsys, "inspect", "e4m3", "448")
    assert "no code" in run(capsys, "inspect", "e2m1", "nan")


def test_numbers_are_exact_beyond_float64() -> None:
    fmt = qsim.format("e4m3")
    just_above_the_tie = parse("1.0625" + "0" * 30 + "1")
    assert just_above_the_tie.rounded(fmt, "nearest") == 1.125
    assert parse("1.0625").rounded(fmt, "nearest") == 1.0
    assert parse("1e-400").rounded(fmt, "up") == fmt.smallest
    assert parse("-1e400").rounded(fmt, "nearest", "nonfinite") != parse("-448").rounded(fmt, "nearest")
    assert neighbours(parse("1/3"), fmt).position == Fraction(2, 3)


def test_round_to_odd_never_makes_a_tie() -> None:
    tiny = Fraction(1, 2**200)
    for value in (Fraction(1), Fraction(3, 2), Fraction(17, 16), Fraction(-17, 16), Fraction(2)):
        assert round_to_odd(value) == value
        for exact in (value + tiny, value - tiny):
            assert (Fraction(round_to_odd(exact)) > value) == (exact > value)
            assert Fraction(round_to_odd(exact)) != value


# block formats


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxint8", "nvfp4", "fp8_1x128", "fp8_128x128", "Block('e3m2', 4, rule='even')"])
@pytest.mark.parametrize("values", [("0.3",), ("0.3", "-0.1", "6", "1e-9"), ("-1e30", "65504"), ("0", "-0.0")])
def test_numbers_in_a_block_are_those_of_the_library(capsys: pytest.CaptureFixture[str], name: str, values: tuple[str, ...]) -> None:
    found = json.loads(run(capsys, "inspect", name, "--json", *values))
    x = torch.tensor([[parse(value).carrier for value in values]], dtype=torch.float64)
    codes = qsim.encode(x, name)
    assert found["format"] == repr(qsim.scaling.block_formats.resolve(name))
    assert found["scale"]["code"] == codes.scales.item()
    assert found["outer"] == (None if codes.outer is None else codes.outer.item())
    for rounding in set(qsim.rounding.NAMED) - {"stochastic"}:
        expected = qsim.quantize(x, name, rounding=rounding)
        assert [repr(entry["scaled"][rounding]) for entry in found["values"]] == [repr(value) for value in expected[0].tolist()]
    for value, entry in zip(values, found["values"], strict=True):
        assert entry["value"].startswith(f"{value} / ")


def test_a_block_shows_its_scale_and_its_elements(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "inspect", "mxfp4", "0.3", "-0.1", "--rounding", "nearest", "--rounding", "stochastic")
    assert text.startswith("0.3, -0.1 in a block of mxfp4 = Block('e2m1', 32, scale='e8m0', rule='floor')\n")
    # 0.3 is between 2**-2 and 2**-1, and the elements reach 2**2: 2**-4.
    assert "  scale  0.0625  01111011  0x7b, from the largest magnitude, that of 0.3\n" in text
    assert "0.3 / 0.0625 in e2m1 = Float(2, 1)\n" in text
    assert "  position  2/5 = 0.4 of the way from 4 to 6\n" in text
    assert "  rounding  result  code         result × scale\n  nearest   4       0|11|0  0x6  0.25\n" in text
    assert "-0.1 / 0.0625 in e2m1 = Float(2, 1)\n" in text
    nvfp4 = run(capsys, "inspect", "nvfp4", "2688", "--rounding", "nearest")
    assert "  scale  448  0|1111|110  0x7e, from the largest magnitude, that of 2688\n" in nvfp4
    assert "  outer  1, the scale of a tensor that consists of this block; elements are multiplied by 448\n" in nvfp4


@pytest.mark.parametrize("bad", ["nan", "-inf"])
def test_non_finite_numbers_make_their_block_nan(capsys: pytest.CaptureFixture[str], bad: str) -> None:
    assert run(capsys, "inspect", "mxfp4", "0.3", bad).endswith("scale  nan: a number that is not finite makes NaN of its whole block\n")
    found = json.loads(run(capsys, "inspect", "mxfp4", "--json", "0.3", bad))
    assert (found["scale"]["value"], found["values"]) == ("nan", None)


# terminals


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Make the captured output look like a terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))


@pytest.mark.parametrize(
    "words", [["formats"], ["formats", "e4m3"], ["recipes"], ["recipes", "nvfp4"], ["recipes", "stochastic_backward('e4m1')"], ["study"]]
)
def test_listings_fit_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    on_terminal(monkeypatch, 64)
    lines = run(capsys, *words).splitlines()
    assert max(map(len, lines)) <= 64
    assert len(lines) > 5


def test_columns_that_are_left_out_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch, 80)
    single = run(capsys, "formats").split("\n\n")[0]
    assert "Omitted for lack of space: epsilon, smallest normal; qsim formats NAME shows\nthem." in single
    assert "smallest normal" not in single.splitlines()[0]
    on_terminal(monkeypatch, 200)
    assert "Omitted" not in run(capsys, "formats")


def test_wrapped_listings_say_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wide = run(capsys, "recipes")
    assert max(map(len, wide.splitlines())) > 100
    on_terminal(monkeypatch, 70)
    wrapped = run(capsys, "recipes")
    assert max(map(len, wrapped.splitlines())) <= 70
    joined = " ".join(wrapped.split())
    assert all(" ".join(line.split()) in joined for line in wide.splitlines())


# errors and help


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "e4m33", "1"], "unknown format 'e4m33': did you mean 'e4m3'?"),
        (["formats", "e4m33"], "unknown format 'e4m33': did you mean 'e4m3'?"),
        (["inspect", "fp64", "1"], "inspect: numbers are read as float64, so that nothing is rounded to fp64: give a narrower format"),
        (["inspect", "e4m3", "abc"], "'abc' is not a number: write 0.3, -1e-5, 1/3, 0x1.8p-3, inf or nan"),
        (["inspect", "e4m3", "1/0"], "'1/0' is not a number"),
        (["inspect", "e4m3", "1e99999999"], "exponents must be from -5000 to 5000"),
        (["inspect", "e4m3", "1", "--rounding", "neerest"], "unknown rounding 'neerest': did you mean 'nearest'?"),
        (["inspect", "e4m3", "1", "--bits", "33"], "bits must be in 1…32, got 33"),
        (["bench", "nothing"], "no measurement is called 'nothing'"),
        (["inspect", "Block('e2m1', 2)", "1", "2", "3"], "the numbers share a block of 2 per row, got 3"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qsim: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["--help"], ["formats", "--help"], ["inspect", "--help"], ["bench", "--help"]])
def test_help_has_examples(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(words)
    assert "examples:\n  qsim " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["formats", "inspect", "recipes", "bench", "study"])
def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"qsim.cli.{command}.run", interrupted)
    assert main([command, *(["e4m3", "1"] if command == "inspect" else [])]) == 130
    assert capsys.readouterr() == ("", "qsim: interrupted\n")


@pytest.mark.parametrize(("words", "unknown"), [(["formats", "e4m3", "extra"], "extra"), (["recipes", "mxfp8", "--jsn"], "--jsn")])
def test_unknown_words_show_the_usage_of_their_command(capsys: pytest.CaptureFixture[str], words: list[str], unknown: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error = capsys.readouterr().err
    assert error.startswith(f"usage: qsim {words[0]} ")
    assert f"qsim {words[0]}: error: unrecognized arguments: {unknown}\n" in error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"qsim {qsim.__version__}\n"


def test_no_words_give_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: qsim" in run(capsys)


@pytest.mark.slow
def test_as_a_process() -> None:
    # tests/project/installed.py runs a command that succeeds.
    bad = subprocess.run([sys.executable, "-m", "qsim", "formats", "fp9"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("qsim: unknown format 'fp9'")
    assert bad.stderr.count("\n") == 1
