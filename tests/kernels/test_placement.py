"""Where texts in PTX expect elements, compared with where Triton's intermediate code places them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from qsim_kernels.triton.placement import Placement, misplaced, placement_of
from support.triton_code import EXPECTED, compiled_code


def blocked(registers: str, lanes: str, warps: str = "[4, 1]", order: str = "[1, 0]") -> str:
    return f"#ttg.blocked<{{sizePerThread = {registers}, threadsPerWarp = {lanes}, warpsPerCTA = {warps}, order = {order}}}>"


def linear(registers: str, lanes: str) -> str:
    return f"#ttg.linear<{{register = {registers}, lane = {lanes}, warp = [[1, 0], [2, 0]], block = []}}>"


LANES_OF_ROWS = "[[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]"
#: Encodings of a matrix where texts get what they expect.
PLACED = [
    ("thread", blocked("[1, 4]", "[1, 32]")),
    ("thread", blocked("[1, 8]", "[2, 16]")),
    ("thread", blocked("[2, 4]", "[1, 32]")),
    ("thread", linear("[[0, 1], [0, 2], [4, 0]]", LANES_OF_ROWS)),
    ("lanes", blocked("[1, 1]", "[1, 32]")),
    ("lanes", blocked("[8, 1]", "[8, 4]")),
    ("lanes", linear("[[1, 0]]", "[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]")),
    ("copies", linear("[[0, 1]]", "[[0, 0], [0, 2], [0, 4], [0, 8], [0, 16]]")),
]
#: Encodings where they do not: what a change in Triton could bring.
MISPLACED = [
    ("thread", blocked("[1, 2]", "[1, 32]")),  # half of a block
    ("thread", blocked("[4, 1]", "[1, 32]")),  # a column in place of a row
    ("thread", blocked("[2, 4]", "[1, 32]", order="[0, 1]")),  # the first registers are a column's
    ("thread", linear("[[0, 2], [0, 1]]", LANES_OF_ROWS)),  # another order
    ("thread", linear("[[0, 1], [0, 4]]", "[[0, 2], [0, 8], [0, 16], [0, 32], [0, 64]]")),  # not neighbours
    ("lanes", blocked("[1, 2]", "[1, 32]")),  # neighbours in a thread
    ("lanes", blocked("[1, 1]", "[32, 1]")),  # lanes down a column
    ("lanes", blocked("[1, 1]", "[16, 2]")),  # pairs of lanes
    ("lanes", linear("[[1, 0]]", "[[0, 2], [0, 1], [0, 4], [0, 8], [0, 16]]")),  # the next but one
    ("copies", linear("[[0, 1]]", "[[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]]")),  # each lane its own elements
    ("copies", linear("[[0, 1]]", "[[0, 2], [0, 0], [0, 4], [0, 8], [0, 16]]")),  # copies two lanes apart
]


@pytest.mark.parametrize(("expects", "encoding"), PLACED)
def test_elements_where_texts_expect_them(expects: str, encoding: str) -> None:
    assert not list(misplaced(compiled_code(expects, encoding)))


@pytest.mark.parametrize(("expects", "encoding"), MISPLACED)
def test_elements_elsewhere(expects: str, encoding: str) -> None:
    assert len(list(misplaced(compiled_code(expects, encoding)))) == 1


def test_copies_of_a_maximum_over_two_lanes() -> None:
    """The layout of a tensor that was reduced along its last dimension: of the lanes that held parts of a row, all have its result."""
    two, four = (f"#ttg.slice<{{dim = 1, parent = {blocked('[1, 4]', lanes)}}}>" for lanes in ("[16, 2]", "[8, 4]"))
    assert not list(misplaced(compiled_code("copies", two, "64")))
    assert not list(misplaced(compiled_code("copies", four, "64")))
    one = f"#ttg.slice<{{dim = 1, parent = {blocked('[1, 8]', '[32, 1]')}}}>"
    assert len(list(misplaced(compiled_code("copies", one, "64")))) == 1


#: What becomes of numbers that differ between lanes which the compiler takes for copies.
COPIES = linear("[[0, 1]]", "[[0, 0], [0, 2], [0, 4], [0, 8], [0, 16]]")
TENSOR = "tensor<8x128xi32, #own>"


@pytest.mark.parametrize(
    ("between", "named"),
    [
        (f"    %c = arith.addi %b, %one : {TENSOR}", None),
        (f"    %x = tt.bitcast %b : {TENSOR} -> tensor<8x128xf32, #own>\n    %c = math.absf %x : tensor<8x128xf32, #own>", None),
        (f"    %c = ttg.convert_layout %b : {TENSOR} -> tensor<8x128xi32, #own>", "ttg.convert_layout"),
        (f"    %c = arith.addi %b, %one : {TENSOR}\n    tt.store %to, %c : tensor<8x128x!tt.ptr<i32>, #own>", "tt.store"),
        ('    %c = "tt.reduce"(%b) <{axis = 1 : i32}> ({', "tt.reduce"),
    ],
)
def test_numbers_that_differ_between_copies_stay_where_they_are(between: str, named: str | None) -> None:
    faults = list(misplaced(compiled_code("copies", COPIES, between=between)))
    assert faults == ([] if named is None else [f"numbers that differ between lanes go through {named}"])


def test_after_the_second_text_numbers_may_go_anywhere() -> None:
    code = compiled_code("copies", COPIES, between=f"    %c = arith.addi %b, %one : {TENSOR}")
    after = f"    %e = ttg.convert_layout %d : {TENSOR} -> tensor<8x128xi32, #own>"
    assert not list(misplaced(code.removesuffix("}") + after + "\n}"))


def test_a_layout_that_is_not_known_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"in a layout that qsim does not know: #ttg\.novel<\{\}>"):
        list(misplaced(compiled_code("thread", "#ttg.novel<{}>")))


def test_texts_say_what_they_expect() -> None:
    from qsim_kernels.triton.device import code_pairs, column_pairs, scaled_pairs, shared_scales, undecided

    assert placement_of(code_pairs.IN_BYTES.value) == placement_of(code_pairs.NARROW.value) == Placement(thread=8)
    assert placement_of(scaled_pairs.ScaledForm(True, True, True).code[0]) == EXPECTED["thread"]
    assert placement_of(scaled_pairs.TurnedForm(True, True, True, True).code[0]) == EXPECTED["lanes"]
    assert placement_of(shared_scales.ONE_OF_TWO.value) == placement_of(shared_scales.BOTH.value) == EXPECTED["copies"]
    assert placement_of(undecided.SETTLE.value) is placement_of(column_pairs.SATURATING.value) is None
