"""The format explorer: its formats are qsim's, its results `qsim.quantize`'s, and its page works with keyboard, link and screen reader."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim.formats import Fixed, Float, Format, PowerOfTwo
from qsim.formats.floating import Specials
from qsim.silicon import emit
from qsim.silicon.inputs import corners, weighted
from qsim.silicon.printers import transcription
from qsim_kernels.numbers.carrier import DOUBLE, Variant, grid_bits
from qsim_kernels.numbers.encoding import coding_bits
from support.chromium import Chromium
from support.emitted import run, tool
from support.explorer import DOCS, How, in_chromium, in_node, quantized, script

FORMATS = [
    "e4m3",
    "e2m1",
    "e8m0",
    "int8",
    "bf16",
    "e3m2b4fn",
    "e5m2fnuz",
    "uint4",
    "Fixed(6, 3, symmetric=True)",
    "Float(3, 2, subnormals=False)",
    "Float(3, 2, subnormals='flush')",
]
HOWS = [How(fmt, rule, over) for fmt in FORMATS for rule in qsim.rounding.NAMED for over in ("saturate", "nonfinite")]
HOWS += [How("int8", "nearest", "saturate_symmetric"), How("e5m2", "nearest", "format"), How("e4m3", "nearest", "format")]


def inputs(count: int) -> Tensor:
    """Corners of two formats, and weighted numbers."""
    generator = torch.Generator().manual_seed(3)
    return torch.cat([corners(qsim.format("e3m2"))[::7], corners(qsim.format("int8"))[::29], weighted(count, generator)])


def every_format() -> Iterator[tuple[str, Format]]:
    """Floats of all sizes and special values, with several biases, integers, fixed point and powers of two, as they are spelt."""
    made: list[Any] = []
    specials: tuple[Specials, ...] = ("ieee", "fn", "fnuz", "none")
    for e, m, special in itertools.product(range(1, 9), (0, 1, 2, 3, 7, 10, 23), specials):
        choices: list[dict[str, Any]] = [{}, {"bias": 3}, {"bias": -20}, {"subnormals": False}, {"subnormals": "flush"}, {"signed": False}]
        made += [lambda e=e, m=m, special=special, given=given: Float(e, m, specials=special, **given) for given in choices]
    made += [lambda e=e, bias=bias: PowerOfTwo(e, bias) for e in range(2, 9) for bias in (None, 5)]
    made += [
        lambda bits=bits, f=f, s=s: Fixed(bits, f, signed=s) for bits in (1, 2, 4, 8, 24, 25) for f in (0, 3, -5) for s in (True, False)
    ]
    made += [lambda bits=bits: Fixed(bits, 2, symmetric=True) for bits in (2, 8)]
    for make in made:
        try:
            fmt = make()
        except ValueError:
            continue
        if qsim.formats.holds(torch.float32, fmt) and fmt.max > 0:
            yield repr(fmt), fmt
    yield from ((name, fmt) for name, fmt in qsim.formats.NAMED.items() if fmt != qsim.formats.FP64)


def in_bits(fmt: Format) -> dict[str, Any]:
    """The numbers of a format, as the library's arithmetic takes them."""
    how = grid_bits(fmt.grid, wide=True)
    numbers, facts = coding_bits(fmt.grid, fmt.coding, how)
    known = Variant(0, 0, False, how.zero, how.signed, how.negative_zero, how.signed and how.top == how.bottom, False, how.flush)
    return {
        "bits": fmt.bits,
        "numbers": {name: str(x) for name, x in how.numbers()._asdict().items() if name != "table"},
        "known": {name: bool(x) for name, x in known._asdict().items() if name not in ("mode", "overflow", "table")},
        "code_numbers": {name: str(x) for name, x in numbers._asdict().items()},
        "code_facts": facts._asdict(),
    }


def node(folder: Path, text: str, *given: object) -> Any:
    """The value of a function of the script's `qsim` and of some values."""
    (folder / "ask.cjs").write_text(
        f"require({json.dumps(str(script(folder)))});\n"
        f"const answer = ({text})(...{json.dumps(given)});\n"
        "console.log(JSON.stringify(answer, (_, x) => typeof x === 'bigint' ? String(x) : x));"
    )
    return json.loads(run(tool("node"), folder / "ask.cjs"))


def test_formats_are_those_of_the_library(tmp_path: Path) -> None:
    formats = dict(every_format())
    assert len(formats) > 700
    found = node(
        tmp_path,
        "(names) => names.map((name) => { const { bits, numbers, known, code_numbers, code_facts } = qsim.format(name);"
        " return { bits, numbers, known, code_numbers, code_facts }; })",
        list(formats),
    )
    for (name, fmt), numbers in zip(formats.items(), found, strict=True):
        assert numbers == in_bits(fmt), name


def test_spellings_that_are_no_formats_are_errors_in_both(tmp_path: Path) -> None:
    names = [
        "e9m3",
        "e4m24",
        "e0m3",
        "int33",
        "int0",
        "fp8",
        "Float(3)",
        "Float(3, 2, bias=501)",
        "Int(1)",
        "Float(1, 0, specials='fn')",
        "",
    ]
    found = node(
        tmp_path,
        "(names) => names.map((name) => { try { qsim.format(name); return null; } catch ({ message }) { return message; } })",
        names,
    )
    assert all(found)
    for name in set(names) - {"Int(1)"}:  # which has -1 and 0, and no scale
        with pytest.raises((ValueError, TypeError)):
            qsim.format(name)


def test_results_in_node_are_quantizes(tmp_path: Path) -> None:
    x = inputs(400)
    for how, found in zip(HOWS, in_node(HOWS, x, tmp_path), strict=True):
        assert found.tolist() == quantized(how, x).tolist(), how


def test_codes_and_values_are_the_librarys(tmp_path: Path) -> None:
    names = [name for name in FORMATS if qsim.format(name).bits <= 8]
    found = node(
        tmp_path,
        "(names) => names.map((name) => { const fmt = qsim.format(name); return Array.from({ length: 2 ** fmt.bits }, (_, code) =>"
        " { const x = qsim.decode(code, fmt); return [String(x), Number.isNaN(x) ? null : qsim.encode(x, fmt)]; }); })",
        names,
    )
    for name, rows in zip(names, found, strict=True):
        fmt = qsim.format(name)
        values = qsim.decode(torch.arange(1 << fmt.bits).to(torch.uint8), fmt)
        torch.testing.assert_close(torch.tensor([float(text) for text, _ in rows]), values, rtol=0, atol=0, equal_nan=True)
        codes = qsim.encode(values, fmt).long() & (1 << fmt.bits) - 1
        assert [code for _, code in rows if code is not None] == codes[~values.isnan()].tolist(), name


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("scale", "rule"), [("e8m0", "floor"), ("e8m0", "ceil"), ("e8m0", "even"), ("e4m3", "fit"), ("fp32", "fit"), ("fp32", "ceil")]
)
def test_blocks_are_the_librarys(scale: str, rule: Any, tmp_path: Path) -> None:
    x = torch.randn(96, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-40, 56)
    x[5], x[20:24] = torch.inf, 0.0
    given = [str(value).replace("inf", "Infinity") for value in x.tolist()]
    for element, rounding in (("e2m1", "nearest"), ("e4m3", "up"), ("int8", "odd")):
        found = node(
            tmp_path,
            "(x, element, scale, ...how) => qsim.quantize_blocks(x.map(Number), qsim.format(element), 4, qsim.format(scale), ...how)"
            ".flatMap(({ elements }) => elements.map(({ value }) => String(value)))",
            given, element, scale, rule, rounding,
        )  # fmt: skip
        values = torch.tensor([float(text.replace("Infinity", "inf")) for text in found])
        expected = qsim.quantize(x, qsim.Block(element, 4, scale, rule), rounding)
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_chances_are_shares_of_random_integers(tmp_path: Path) -> None:
    for bits, x in itertools.product((1, 3, 8), (0.3, -0.7, 1.0, 5.9, 100.0, 1e-9)):
        found = node(tmp_path, "(x, bits) => qsim.chance(Math.fround(x), qsim.format('e2m1'), 'saturate', bits)", x, bits)
        circuit = qsim.silicon.Circuit("e2m1", "round", qsim.Stochastic(bits))
        words = torch.arange(1 << bits)
        y = qsim.silicon.golden.results(circuit, torch.tensor([x]).view(torch.int32).long().expand_as(words) & 0xFFFFFFFF, words)
        values = y.to(torch.int32).view(torch.float32)
        if found["up"]:
            assert found["up"] == (values == found["above"]).double().mean(), (x, bits)
        else:
            assert (values == found["below"]).all()


def test_emitted_for_any_format_is_a_module_of_javascript() -> None:
    text = emit("javascript", "any")
    assert "export const double = " in text
    assert "function round_bits(bits, drawn, grid, variant)" in text
    with pytest.raises(ValueError, match="format='any' is for JavaScript, got language='c'"):
        emit("c", "any")
    with pytest.raises(TypeError, match="the arithmetic has a statement that has no text in JavaScript: pass"):
        transcription.function(_without_text)
    assert text.count(f"MANTISSA: {DOUBLE.mantissa}n") == 1


def _without_text() -> None:
    pass


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the explorer's page, on a site that has no other."""
    sphinx = pytest.importorskip("sphinx.application")
    source = tmp_path_factory.mktemp("site")
    (source / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(DOCS / '_ext')!r})\nextensions = ['myst_parser', 'explorer']\nhtml_theme = 'furo'\n"
        "html_css_files = []\nroot_doc = 'explorer'\n"
    )
    (source / "explorer.md").write_text("# Explorer\n\n```{explorer}\n```\n")
    sphinx.Sphinx(source, source, source / "out", source / "trees", "html", status=None, warningiserror=True).build()
    return (source / "out" / "explorer.html").as_uri()


def values_shown(browser: Chromium) -> dict[str, float]:
    """The results of all roundings on the page."""
    pairs = browser.evaluate(
        "[...document.querySelectorAll('[data-part=roundings] [data-value]')].map((cell) => [cell.dataset.value, cell.textContent])"
    )
    return {name: float(text.replace("∞", "inf")) for name, text in pairs}


@pytest.mark.slow
def test_values_on_the_page_are_quantizes(browser: Chromium, page: str) -> None:
    for x, fmt, overflow in itertools.product(
        (0.3, -1e6, 1e-9, 0.1875), ("e4m3", "e2m1", "e8m0", "bf16", "Float(3, 2, bias=4)"), ("saturate", "nonfinite")
    ):
        browser.open(f"{page}#x={x}&format={fmt.replace(' ', '%20')}&overflow={overflow}")
        found = values_shown(browser)
        for name in set(qsim.rounding.NAMED) - {"stochastic"}:
            expected = qsim.quantize(torch.tensor(x), fmt, name, overflow=overflow)  # type: ignore[arg-type]
            torch.testing.assert_close(torch.tensor(found[name]), expected, rtol=0, atol=0, equal_nan=True)
    blocks = "[...document.querySelectorAll('[data-block]')].map((cell) => cell.textContent)"
    browser.open(f"{page}#format=e2m1&size=2&values=0.1,0.2%200.3%0A60")
    assert list(map(float, browser.evaluate(blocks))) == qsim.quantize(torch.tensor([0.1, 0.2, 0.3, 60.0]), qsim.Block("e2m1", 2)).tolist()


@pytest.mark.slow
def test_links_carry_the_state(browser: Chromium, page: str) -> None:
    browser.open(page)
    assert browser.evaluate("location.hash") == ""
    typed = {"x": "1/3", "format": "Float(3, 2, bias=4)", "overflow": "nonfinite", "values": "1 2 3"}
    browser.evaluate(
        f"Object.entries({json.dumps(typed)}).forEach(([name, value]) => {{"
        " const input = document.querySelector(`[name=${name}]`);"
        " input.value = value; input.dispatchEvent(new Event('input', { bubbles: true })); })"
    )
    address, before = browser.evaluate("location.href"), browser.evaluate("document.querySelector('.explorer').innerText")
    assert "#x=" in address
    browser.open(address)
    assert browser.evaluate("document.querySelector('.explorer').innerText") == before
    state = "Object.fromEntries([...document.querySelectorAll('.explorer [name]')].map((input) => [input.name, input.value]))"
    assert typed.items() <= browser.evaluate(state).items()


@pytest.mark.slow
def test_the_page_works_with_the_keyboard(browser: Chromium, page: str) -> None:
    """Tab reaches every control in order; keys type a number, go to the next value and flip a bit."""
    browser.open(page)
    browser.evaluate("document.querySelector('[name=x]').focus(); document.querySelector('[name=x]').select()")
    browser.call("Input.insertText", text="1")
    result = "document.querySelector('[data-value=nearest]').textContent"
    assert browser.evaluate(result) == "1"
    reached = []
    for _ in range(12):
        browser.press("Tab")
        reached.append(
            browser.evaluate("document.activeElement.name || document.activeElement.dataset.step || document.activeElement.dataset.bit")
        )
        if reached[-1] == "up":
            browser.press("Enter", "\r")
            assert browser.evaluate(result) == "1.125"
        if reached[-1] == "7":
            browser.press(" ", " ")
            assert browser.evaluate(result) == "-1.125"
    assert reached[:6] == ["format", "overflow", "bits", "down", "up", None]
    assert reached[6:] == ["7", "6", "5", "4", "3", "2"]


@pytest.mark.slow
def test_the_page_is_accessible_and_fits_a_phone(browser: Chromium, page: str) -> None:
    browser.open(f"{page}#format=Float(8,%2023,%20specials='ieee')", width=390)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    unnamed = "[...document.querySelectorAll('.explorer :is(input, select, textarea, button, svg, [role])')].filter((x) =>"
    unnamed += " !(x.labels?.length || x.ariaLabel || x.textContent.trim() || x.getAttribute('aria-live'))).length"
    assert browser.evaluate(unnamed) == 0
    assert browser.evaluate("document.querySelector('.result').getAttribute('aria-live')") == "polite"
    duplicates = "(ids => ids.length - new Set(ids).size)([...document.querySelectorAll('[id]')].map((x) => x.id))"
    assert browser.evaluate(duplicates) == 0
    browser.open(f"{page}#format=posit8")
    assert "is not a format" in browser.evaluate("document.querySelector('.result').textContent")
    assert browser.evaluate("document.querySelector('[name=format]').getAttribute('aria-invalid')") == "true"
    addresses = "performance.getEntriesByType('resource').filter((x) => !x.name.startsWith('file:') && !x.name.startsWith('data:')).length"
    assert browser.evaluate(addresses) == 0


@pytest.mark.slow
def test_results_in_chromium_are_quantizes(browser: Chromium, tmp_path: Path) -> None:
    x = inputs(200)
    for how, found in zip(HOWS[::5], in_chromium(HOWS[::5], x, browser, tmp_path), strict=True):
        assert found.tolist() == quantized(how, x).tolist(), how
