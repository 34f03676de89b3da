"""Tests of `qsim bench`: what is measured, and errors for bad arguments. Speed itself is not tested."""

import json
import types

import pytest
import torch

import qsim
from qsim.cli import main
from qsim.cli.bench._counting import compilations
from qsim.cli.bench._options import DTYPES, BenchSettings
from qsim.cli.bench.quantize import LAYOUTS, SWEPT
from qsim.formats import holds

TINY = ("--device", "cpu", "--elements", "2^6", "--repeats", "2")


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["bench", "quantize", *TINY, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


# what is measured


def test_quantize_measures_every_combination_or_says_that_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "--only", "quantize")
    assert found["heading"].endswith(f"qsim {qsim.__version__}; 2^6 elements")
    rows = found["rows"]
    places = [(row["dtypes"], row["format"], row["rounding"]) for row in rows]
    pairs = [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16")]
    names, roundings = ["e4m3", "e5m2", "e2m1", "e4m0", "fp16"], ["nearest", "stochastic", "up"]
    assert places == [(f"{a}→{b}", name, rounding) for a, b in pairs for name in names for rounding in roundings]
    refused = {(row["dtypes"], row["format"]) for row in rows if row.get("refused")}
    assert refused == {("bf16→bf16", "fp16"), ("fp32→bf16", "fp16")}
    for row in rows:
        source, target = (DTYPES[name] for name in row["dtypes"].split("→"))
        x, out = torch.zeros(64, dtype=source), torch.empty(64, dtype=target)
        if row.get("refused"):
            assert row["note"] == "unsupported: bf16 cannot hold every value of fp16"
            with pytest.raises(ValueError, match="cannot hold every value"):
                qsim.quantize(x, row["format"], out=out)
        else:
            assert row["bytes"] == x.nbytes + out.nbytes
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
            assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])
            assert row["ratio"] > 0


def test_codes_are_measured_with_their_own_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "--only", "codes", "--formats", "e4m3,e2m1,fp16", "--roundings", "nearest", "--dtypes", "fp32:bf16,bf16")["rows"]
    found = {(row["work"], row["format"], row["dtypes"]): row.get("bytes") for row in rows}
    assert found == {
        ("encode", "e4m3", "fp32→codes"): 64 * 5,
        ("encode", "e2m1", "fp32→codes"): 64 * 5,
        ("encode, check=False", "e2m1", "fp32→codes"): 64 * 5,
        ("encode", "fp16", "fp32→codes"): 64 * 6,
        ("encode", "e4m3", "bf16→codes"): 64 * 3,
        ("encode", "e2m1", "bf16→codes"): 64 * 3,
        ("encode, check=False", "e2m1", "bf16→codes"): 64 * 3,
        ("encode", "fp16", "bf16→codes"): 64 * 4,
        ("decode", "e4m3", "codes→bf16"): 64 * 3,
        ("decode", "e2m1", "codes→bf16"): 64 * 3,
        ("decode", "fp16", "codes→bf16"): None,
    }
    assert all(row["ratio"] > 0 for row in rows if not row.get("refused"))


def test_layouts_are_measured_for_the_first_format_in_every_order(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "--only", "layouts", "--formats", "e4m3,e2m1", "--roundings", "nearest", "--dtypes", "fp32:bf16,bf16")["rows"]
    assert [(row["work"], row["format"], row["dtypes"]) for row in rows] == [
        (layout, "e4m3", dtypes) for dtypes in ("fp32→bf16", "bf16→bf16") for layout in LAYOUTS
    ]
    tiny, larger = (BenchSettings(device=torch.device("cpu"), elements=count) for count in (2**6, 2**18))
    for layout, lay in LAYOUTS.items():
        count = lay(tiny, torch.float32).numel()
        assert {row["bytes"] for row in rows if row["work"] == layout} == {6 * count, 4 * count}
        assert not lay(larger, torch.float32).is_contiguous()


def test_sweep_rounds_into_fifty_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(set(SWEPT)) == 50
    assert all(holds(torch.float32, fmt) for fmt in SWEPT)
    rows = bench(capsys, "--only", "sweep", "--roundings", "nearest,stochastic")["rows"]
    assert [(row["rounding"], row["formats"]) for row in rows] == [("nearest", 50), ("stochastic", 50)]
    assert all(row["first_seconds"] > 0 and row["seconds"] > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles")
def test_nothing_is_compiled_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert [(row["compiled"], row["kernels"]) for row in bench(capsys, "--only", "sweep")["rows"]] == [(0, [])] * 3


def test_compilations_are_counted_and_the_hook_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("triton").knobs.runtime
    seen: list[str] = []

    def hook(**kwargs: object) -> None:
        seen.append("before")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "jit_post_compile_hook", hook)
    with compilations() as names:
        for name in ("quantize_kernel", "quantize_kernel", "encode_kernel"):
            # In triton's notation.
            runtime.jit_post_compile_hook(key="", repr="", fn=types.SimpleNamespace(name=name), compile={}, already_compiled=False)
    assert names == ["quantize_kernel", "quantize_kernel", "encode_kernel"]
    assert seen == ["before"] * 3
    assert runtime.jit_post_compile_hook is hook


# on a GPU


@pytest.mark.gpu
def test_every_part_runs_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "quantize", "--device", "cuda", "--elements", "2^16", "--repeats", "3", "--formats", "e4m3,e2m1", "--json"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["part"] for row in rows} == {"sweep", "quantize", "codes", "layouts"}
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.gpu
def test_a_second_sweep_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["bench", "quantize", "--device", "cuda", "--only", "sweep", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["compiled"] for row in rows] == [0, 0, 0]
