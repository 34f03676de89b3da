"""The study `llm`: the dtypes that each method stores, the timing, and the report."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

import pytest
import torch

from qsim import studies
from qsim.studies.learners.gpt import GPT, size
from qsim.studies.learners.gpt_training import KAHAN, NEAREST, STOCHASTIC, rate_at
from qsim.studies.llm import BITS, COST, METHODS, MORE_BITS, PERPLEXITY, LLMStudy, Settings, made, training
from qsim.studies.llm.report import Written
from qsim.studies.llm.training import BF16, FP32, O1, O2, WeightUpdater, outcome
from qsim.studies.result import Result
from qsim.studies.study import Run

pytestmark = pytest.mark.usefixtures("plain_arithmetic")
CPU = torch.device("cpu")


def run(method: str, states: str = BF16, gradients: str = BF16, **others: object) -> Run:
    if method in (O1, O2):
        states = gradients = FP32
    return Run(**{**made(LLMStudy().quick(), method, 2e-3, states, gradients), "seed": 0, **others})


def begun(chosen: Run) -> tuple[GPT, WeightUpdater]:
    torch.manual_seed(chosen.seed)
    model = GPT(size("tiny"), chosen.vocabulary, chosen.context)
    return model, WeightUpdater(chosen, model)


@pytest.fixture(scope="module")
def found(quick_study: Callable[..., studies.Plan]) -> tuple[studies.Report, Written]:
    plan = quick_study("llm", steps=8, context=8)
    return plan.report(), Written(plan.study, plan.settings, list(plan.store.results().values()))


def test_models_learn_alike_with_every_method(found: tuple[studies.Report, Written]) -> None:
    findings = found[1]
    (rate,) = findings.settings.rates
    mixed = findings.losses(O1, rate)
    # One bit in 256 per weight: it changed the loss by up to 0.0017, over eight seeds with the kernels of AVX2 and four with plain SSE.
    for method in (STOCHASTIC, KAHAN, O2):
        assert abs(mean(findings.losses(method, rate)) - mean(mixed)) < 0.005, method
    for bits in MORE_BITS:
        assert abs(mean(findings.losses(STOCHASTIC, rate, *bits)) - mean(mixed)) < 0.005, bits
    for method in METHODS:
        for result in findings.trained(method, rate):
            steps, losses = zip(*result["curve"], strict=True)
            assert steps == (1, 2, 4, 5, 7, 8)
            # Starting from no knowledge.
            assert abs(losses[0] - math.log(256)) < 0.5
            assert list(losses) == sorted(losses, reverse=True)
            assert losses[-1] == result["loss"]


def test_the_report_shows_the_measurements(found: tuple[studies.Report, Written]) -> None:
    report, findings = found
    perplexities, speeds, more_bits = (part for part in report.parts if isinstance(part, studies.Table))
    for method, label in METHODS.items():
        (row,) = perplexities.filter(method=label)
        assert row["rate 0.002"].startswith(f"{math.exp(mean(findings.losses(method, 2e-3))):.3f} [")
        (row,) = speeds.filter(method=label)
        assert row["tokens per second"] == f"{mean(findings.cost(method, 'tokens_per_second')):.0f}"
    assert [(row["moments in"], row["gradients summed in"]) for row in more_bits] == [*product(["BF16", "FP32"], repeat=2)]


def test_a_processor_decides_nothing_about_speed_and_memory(found: tuple[studies.Report, Written]) -> None:
    report = found[0]
    assert not any("memory" in title for part in report.parts if isinstance(part, studies.Table) for title in part.columns)
    assert [picture.name for picture in report.parts if isinstance(picture, studies.Picture)] == ["perplexity", "more-bits"]
    costs = [claim for claim in report.claims if "processor" in claim.measured]
    assert [claim.source for claim in costs] == ["Table 4", "Table 6", "Section 3", "Table 5", "Section 5.2"]
    assert {claim.agrees for claim in costs} == {None}


#: The dtypes in which each method stores weights, the tensors that its optimizer updates, gradients and states.
KEPT = {
    STOCHASTIC: (torch.bfloat16, torch.bfloat16),
    KAHAN: (torch.bfloat16, torch.bfloat16),
    NEAREST: (torch.bfloat16, torch.bfloat16),
    O1: (torch.float32, torch.float32),
    O2: (torch.bfloat16, torch.float32),
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_keep_what_they_say(method: str) -> None:
    chosen = run(method)
    model, updates = begun(chosen)
    before = [weight.detach().clone() for weight in model.parameters()]
    # All start with the same numbers.
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(before, begun(run(STOCHASTIC))[0].parameters(), strict=True))
    training._loss(chosen, model, torch.randint(256, (2, chosen.context + 1), dtype=torch.uint8)).backward()
    assert {weight.dtype for weight in updates.weights} == {KEPT[method][0]}
    assert {weight.grad.dtype for weight in updates.weights if weight.grad is not None} == {KEPT[method][1]}
    updates.step(2e-3)
    assert all(weight.grad is None for weight in (*updates.weights, *updates.moved))
    assert all(torch.isfinite(weight).all() for weight in updates.weights)
    assert not any(torch.equal(a, b) for a, b in zip(before, updates.weights, strict=True) if a.dim() > 1)
    states = list(updates.optimizer.state.values())
    assert len(states) == len(updates.weights)
    assert {each.dtype for each in updates.moved} == {state["exp_avg_sq"].dtype for state in states} == {KEPT[method][1]}
    assert all(("compensation" in state) == (method == KAHAN) for state in states)
    for weight, copy in zip(updates.weights, updates.moved, strict=True):
        # To nearest if there is a copy.
        assert torch.equal(weight, copy.to(weight.dtype))


@pytest.mark.parametrize("states", [BF16, FP32])
@pytest.mark.parametrize("gradients", [BF16, FP32])
def test_states_and_gradients_in_more_bits(states: str, gradients: str) -> None:
    model, updates = begun(run(STOCHASTIC, states, gradients))
    weight = model.blocks[0].merge.weight
    # One, and three times a number that is less than half of BF16's last bit at one.
    for factor in (1.0, 2.0**-9, 2.0**-9, 2.0**-9):
        (weight.sum() * factor).backward()
    kept = 1 + 3 * 2.0**-9 if gradients == FP32 else 1.0
    assert weight.grad is not None
    assert (weight.grad == kept).all()
    updates.step(1e-3)
    assert updates.optimizer.state[weight]["exp_avg"].dtype == {BF16: torch.bfloat16, FP32: torch.float32}[states]
    assert weight.dtype == torch.bfloat16


def test_torch_without_gradients_in_other_dtypes_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        """An old version of torch."""

        Tensor, float32, bfloat16, __version__ = object, torch.float32, torch.bfloat16, "2.9.0"

    chosen = run(STOCHASTIC, gradients=FP32)
    model = GPT(size("tiny"), chosen.vocabulary, chosen.context)
    monkeypatch.setattr(training, "torch", Old)
    with pytest.raises(RuntimeError, match=r"llm: gradients in fp32 of weights in BF16 need torch 2.10 or later; this is 2.9.0"):
        WeightUpdater(chosen, model)


def test_only_training_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by one second per step, a hundred for compilation, and a thousand for validation."""
    now, seen = [0.0], []

    def learn(chosen: Run, model: object, updates: object, found: object, order: object, rate: float) -> None:
        now[0] += 100.0 if len(seen) < 4 else 1.0
        seen.append(rate)

    def validated(*_: object) -> float:
        now[0] += 1000.0
        return 1.0

    monkeypatch.setattr(training, "_learn", learn)
    monkeypatch.setattr(training, "_validated", validated)
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    found = outcome(run(NEAREST, steps=40), CPU)
    assert found["tokens_per_second"] == 4 * 32
    assert found["peak_mib"] is None
    assert seen == [rate_at(2e-3, 40, step) for step in range(40)]
    assert seen.index(max(seen)) in (3, 4)
    assert seen[-1] == pytest.approx(2e-4, rel=0.02)


def test_more_tokens_than_bytes_only_cost() -> None:
    found = outcome(run(STOCHASTIC, vocabulary=1000, steps=2), CPU)
    # Its initial prediction covers all its tokens; two steps change little.
    assert abs(found["curve"][0][1] - math.log(1000)) < 0.5


def made_up(settings: Settings, values: Callable[[Run], dict[str, float]]) -> Written:
    """Written from an invented GPU."""
    own = {"tokens_per_second": 100.0, "peak_mib": 50.0, "loss": 1.0}
    results = []
    for chosen in LLMStudy().runs(settings):
        given = {**own, **values(chosen)}
        results.append(Result(chosen, {**given, "curve": [(1, 5.0), (settings.steps, given["loss"])]}, 1.0, {}))
    return Written(LLMStudy(), settings, results)


SETTINGS = Settings(rates=(5e-4, 1e-3, 2e-3), seeds=3)


def verdicts(values: Callable[[Run], dict[str, float]], best: float = 1e-3) -> list[bool | None]:
    """The verdicts if every method is best at the same rate."""

    def tuned(chosen: Run) -> dict[str, float]:
        found = values(chosen)
        return found | {"loss": found["loss"] + 0.5 * (chosen.rate != best)}

    return [claim.agrees for claim in made_up(SETTINGS, tuned).claims()]


def test_verdicts_can_come_out_either_way() -> None:
    def as_in_the_paper(chosen: Run) -> dict[str, float]:
        noise = 1e-4 * chosen.seed * (chosen.method == STOCHASTIC)
        return {
            "loss": noise + {STOCHASTIC: 1.0, KAHAN: 1.01, NEAREST: 1.2, O1: 1.01, O2: 1.015}[chosen.method],
            "tokens_per_second": (1 + noise) * {STOCHASTIC: 103.0, KAHAN: 100.0, NEAREST: 104.0, O1: 90.0, O2: 100.0}[chosen.method],
            "peak_mib": {STOCHASTIC: 50.0, KAHAN: 55.0, NEAREST: 50.0, O1: 70.0, O2: 60.0}[chosen.method],
        }

    def the_other_way(chosen: Run) -> dict[str, float]:
        more = (chosen.states, chosen.gradients) != (BF16, BF16)
        return {
            "loss": {STOCHASTIC: 0.95 if more else 1.0, KAHAN: 1.1, NEAREST: 0.9, O1: 0.8, O2: 0.8}[chosen.method],
            "tokens_per_second": {STOCHASTIC: 80.0, KAHAN: 100.0, NEAREST: 104.0, O1: 90.0, O2: 100.0}[chosen.method],
            "peak_mib": {STOCHASTIC: 90.0, KAHAN: 55.0, NEAREST: 50.0, O1: 70.0, O2: 60.0}[chosen.method],
        }

    def noisy(chosen: Run) -> dict[str, float]:
        luck = zlib.crc32(LLMStudy().key(chosen).encode()) / 2**32
        return dict.fromkeys(("loss", "tokens_per_second", "peak_mib"), 1 + 5 * luck)

    assert verdicts(as_in_the_paper) == [True] * 9
    assert verdicts(the_other_way) == [False] * 9
    # A coincidence may decide a few, but not most.
    assert verdicts(noisy).count(None) >= 5
    # At the edge of the grid no method is tuned: what was found about tuned methods is open, the rest is not.
    assert verdicts(as_in_the_paper, best=2e-3) == [None] * 3 + [True] * 6


def test_rates_are_tuned_on_a_seed_that_is_not_judged() -> None:
    chosen = replace(
        SETTINGS, methods=(O1, STOCHASTIC, NEAREST), measures=(PERPLEXITY,), tuned=("o1=0.001", "stochastic=0.001", "nearest=0.002")
    )
    assert [(run.seed, run.method, run.rate) for run in LLMStudy().runs(chosen) if run.seed != 1] == [
        *((0, method, rate) for rate in chosen.rates for method in chosen.methods),
        *((seed, method, rate) for seed in (2, 3) for method, rate in ((O1, 1e-3), (STOCHASTIC, 1e-3), (NEAREST, 2e-3))),
    ]
    # The tuning seed would say the opposite. The best rate of nearest is at the edge of the grid.
    found = made_up(chosen, lambda run: {"loss": 1.0 + (run.method != STOCHASTIC) * (0.1 + 0.001 * run.seed if run.seed else -0.5)})
    assert [claim.agrees for claim in found.claims()] == [True, None]
    with pytest.raises(ValueError, match="methods: must be all of stochastic, kahan, nearest, o1, o2 if cost is measured; got o1,o2"):
        LLMStudy().runs(replace(SETTINGS, methods=(O1, O2)))
    with pytest.raises(ValueError, match=r"tuned: must name each method with one of the rates; got o1=0\.001"):
        LLMStudy().runs(replace(chosen, tuned=("o1=0.001",)))


def test_what_stochastic_updates_save_buys_updates_or_a_larger_batch() -> None:
    chosen = replace(SETTINGS, methods=(O1, STOCHASTIC, NEAREST), measures=(PERPLEXITY,), batch=8, steps=100, faster=1.2, larger=1.5)
    more = [run for run in LLMStudy().runs(chosen) if (run.steps, run.batch) != (100, 8)]
    assert [(run.method, run.steps, run.batch) for run in more] == [(STOCHASTIC, 120, 8), (STOCHASTIC, 100, 12)] * 3
    found = made_up(chosen, lambda run: {"loss": 1.0 - (run.steps - 100) / 1000 + (run.batch - 8) / 100 + 0.001 * run.seed})
    assert [claim.agrees for claim in found.claims()][-2:] == [True, False]


def test_perplexity_and_cost_are_measured_together_or_apart(tmp_path: Path) -> None:
    both = made_up(SETTINGS, lambda chosen: {}).claims()
    of_cost, of_perplexity = (replace(SETTINGS, measures=what) for what in ((COST,), (PERPLEXITY, BITS)))
    apart = [made_up(settings, lambda chosen: {}).claims() for settings in (of_perplexity, of_cost)]
    assert [len(found) for found in apart] == [4, 5]
    assert sorted(claim.paper for claim in both) == sorted(claim.paper for found in apart for claim in found)
    # More bits are tried for perplexity.
    assert len(LLMStudy().runs(of_perplexity)) - len(LLMStudy().runs(of_cost)) == SETTINGS.seeds * len(MORE_BITS)
    assert [LLMStudy().timed(settings) for settings in (SETTINGS, of_cost, of_perplexity)] == [True, True, False]
    for settings, pictures in ((of_cost, ["cost"]), (of_perplexity, ["perplexity", "more-bits"])):
        report = made_up(settings, lambda chosen: {}).report()
        assert [part.name for part in report.parts if isinstance(part, studies.Picture)] == pictures
        assert ("tokens per second" in str(report.parts)) == (settings is of_cost)
        assert ("erplexity" in report.meaning) == (settings is of_perplexity)


def test_costs_of_several_models_and_how_they_grow() -> None:
    several = replace(SETTINGS, measures=(COST,), size=("tiny", "mini"))
    faster = {"tiny": 1.1, "mini": 1.2}
    assert [(run.size, run.method) for run in LLMStudy().runs(several)][:10] == [*product(several.size, METHODS)]

    def cost(run: Run) -> dict[str, float]:
        # A run in a hundred is that much faster or slower.
        speed = 1000 / (1 + 0.01 * run.seed) / (faster[run.size] if run.method == O1 else 1.05 if run.method == O2 else 1.0)
        return {"tokens_per_second": speed, "peak_mib": 100.0 + (run.method in (O1, O2)) * (run.size == "mini")}

    found = made_up(several, cost)
    claims = found.claims()
    assert [claim.agrees for claim in claims] == [True, True, True, True, None, None]
    assert claims[0].measured == "tiny: 1.100 [1.100, 1.100] times; mini: 1.200 [1.200, 1.200] times"
    assert claims[3].measured == "1.091 [1.091, 1.091] times"
    assert [claim.expected != "" for claim in claims] == [False] * 4 + [True] * 2

    def slow(run: Run) -> dict[str, float]:
        """The larger model runs stochastic updates at 0.9 times the speed of nearest ones, which differ only in the rounding."""
        found = cost(run)
        return found | {"tokens_per_second": found["tokens_per_second"] * (0.9 if (run.size, run.method) == ("mini", STOCHASTIC) else 1.0)}

    grows = made_up(several, slow).claims()[3]
    assert (grows.agrees, grows.source) == (None, "Table 4")
    speeds = "tiny: 1.000 [1.000, 1.000] times; mini: 0.900 [0.900, 0.900] times"
    control = f"the control fails, speed relative to updates rounded to nearest: {speeds}"
    assert grows.measured == f"0.982 [0.982, 0.982] times; {control}"
    assert "the speed of mixed precision (O1) with 0.99 to 1.00 times its memory" in found.meaning()
    assert found.title().endswith("GPTs with 120,576 to 834,304 parameters")
    assert "A GPT (tiny: 2 blocks, width 64, 2 heads; 120,576 parameters, or mini: " in str(found.parts()[0])


def test_runs_that_share_a_gpu_have_no_speed() -> None:
    assert set(outcome(run(NEAREST, steps=2, timed=False), CPU)) == {"loss", "curve"}


def test_each_method_is_judged_at_its_best_rate() -> None:
    findings = made_up(
        replace(SETTINGS, rates=(1e-3, 2e-3)), lambda chosen: {"loss": 1.0 + (chosen.rate - 1e-3) * (100 if chosen.method == O1 else -100)}
    )
    assert (findings.best(O1), findings.best(STOCHASTIC)) == (1e-3, 2e-3)
    assert findings.beside(STOCHASTIC, O1).value == pytest.approx(math.exp(-0.1))


@pytest.mark.usefixtures("blank_figures")
def test_runs_that_diverged_are_reported(tmp_path: Path) -> None:
    settings = replace(SETTINGS, rates=(1e-3, 2e-3))
    findings = made_up(settings, lambda chosen: {"loss": math.inf if chosen.rate > 1e-3 else 1.0 + 0.01 * chosen.seed})
    assert findings.best(O1) == 1e-3
    paths = findings.report().write(tmp_path, "nowhere")
    assert [path.name for path in paths] == [
        "report.md",
        "perplexity-1.svg",
        "perplexity-2.svg",
        "cost-1.svg",
        "cost-2.svg",
        "more-bits.svg",
    ]
    assert findings.claims()[-1].agrees is None


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"size": ("huge",)}, "size: must be one of tiny, mini, small, medium, large, neo-1.3b, neo-2.7b; got 'huge'"),
        ({"size": ("tiny", "mini")}, "size: must be one, unless only costs are measured; got tiny,mini"),
        ({"vocabulary": 100}, "vocabulary: must be at least 256, the number of tokens; got 100"),
        ({"micro_batches": 3}, "micro_batches: must divide the batch of 8 sequences; got 3"),
        ({"micro_batches": 0}, "micro_batches: must divide the batch of 8 sequences; got 0"),
        ({"measures": ("cost", "time")}, "measures: must be of perplexity, bits, cost; got cost,time"),
        ({"measures": ()}, "measures: must be of perplexity, bits, cost; got none"),
        ({"steps": 1}, "steps: must be at least 2, because the first is not timed; got 1"),
    ],
)
def test_invalid_settings_raise_an_error(chosen: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        studies.plan("llm", settings=chosen).todo()
