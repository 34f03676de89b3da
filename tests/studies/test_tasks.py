"""Generated questions, and the pre-trained GPT that is fine-tuned on them in the study `batch-size`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qsim import studies
from qsim.studies.batch_size import FULL, IN_RANGE, STEPS, BatchSizeStudy, Run, Settings, trained
from qsim.studies.learners import examples, tasks
from qsim.studies.learners.examples import PRETRAINED
from qsim.studies.report import Claim
from support import made_up

CPU = torch.device("cpu")
SETTINGS = Settings(
    data="sums", model=PRETRAINED, formats=("e4m0", "e4m1"), scales=(IN_RANGE,), batches=(8, 16), designs=(STEPS,), micro_batches=1,
    steps=3, rate=1e-3, looks=1, seeds=3,
)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SIZE", "tiny"), ("PRETRAINING", 2), ("_QUESTIONS", 64), ("_TEST", 16)):
        monkeypatch.setattr(tasks, name, value)
    tasks.questions.cache_clear()


def asked(task: str, count: int) -> tuple[list[bytes], bytes]:
    x, y = tasks.TASKS[task][1](torch.arange(40).expand(count, -1), torch.Generator().manual_seed(0))
    return [bytes(row) for row in x.tolist()], bytes(y.tolist())


def test_sums_are_answered_by_letters() -> None:
    for question, answer in zip(*asked("sums", 50), strict=True):
        assert question[-1:] == b"="
        assert answer == ord("A") + sum(map(int, question[:-1].split(b"+")))


def test_a_reversal_is_eight_bytes_anywhere() -> None:
    intact = bytes(range(40))
    for question, answer in zip(*asked("reversals", 50), strict=True):
        assert question[-1:] == b"?"
        moved = [place for place, byte in enumerate(question[:-1]) if byte != place]
        assert bool(moved) == (answer == ord("1"))
        if moved:
            first, last = moved[0], moved[-1] + 1
            assert (last - first, question[first:last]) == (8, intact[first:last][::-1])


@pytest.mark.usefixtures("small")
def test_fine_tuning_begins_with_the_same_model_in_every_format() -> None:
    found = tasks.questions("reversals", CPU)
    state = torch.get_rng_state()
    tasks.questions.cache_clear()
    again = tasks.questions("reversals", CPU)
    assert torch.equal(torch.get_rng_state(), state)
    own, other = found.net(), again.net()
    assert own(found.x[:2]).shape == (2, 256)
    for a, b, c in zip(own.parameters(), other.parameters(), found.net().parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert a is not c
    with pytest.raises(ValueError, match="data: must be one of sums, reversals for a pre-trained model; got 'digits'"):
        tasks.questions("digits", CPU)


@pytest.mark.usefixtures("small")
def test_a_pretrained_model_learns_to_answer() -> None:
    study, ways = BatchSizeStudy(), [trained(SETTINGS, name, "stochastic", 16, IN_RANGE, STEPS) for name in (FULL, "e4m0")]
    runs = [next(run for run in study.runs(SETTINGS) if vars(run).items() >= way.items()) for way in ways]
    values = [study.measure(run, CPU) for run in runs]
    before = examples.examples("sums", PRETRAINED, CPU)
    assert all(found["loss"] < torch.nn.functional.cross_entropy(before.net()(before.test_x), before.test_y) for found in values)
    assert values[0]["loss"] != values[1]["loss"]


def tables(accuracy: Callable[[Run], float]) -> list[Claim]:
    """The claims on fine-tuning, of results that vary a little between seeds."""

    def values(run: Run) -> dict[str, float]:
        if run.like:
            return {"factor": 1.5}
        off = 0.001 * made_up.noise(BatchSizeStudy(), run)
        return {"accuracy": accuracy(run) + off, "guessing": 0.1, "loss": 1.0, "squared_gradient": 1.0, "training_loss": 1.0}

    results = [studies.Result(run, values(run), 1.0, {}) for run in BatchSizeStudy().runs(SETTINGS)]
    report = BatchSizeStudy().report(SETTINGS, results)
    assert "A GPT (mini: 4 blocks, width 128, 4 heads; 834,304 parameters) learns bytes" in str(report.parts[2])
    assert report.title.endswith("Fine-tuning on sums")
    assert "multiplies the loss by 1 times the number of predictions" in str(report.parts[2])
    return [claim for claim in report.claims if claim.source.startswith(("Table", "Section 1"))]


def test_tables_with_their_control() -> None:
    def doubling(run: Run) -> float:
        """Every doubling adds ten points, a bit five; in full precision two."""
        doublings = run.batch // 16
        return 0.9 + 0.02 * doublings if run.format == FULL else 0.5 + 0.05 * (run.format == "e4m1") + 0.1 * doublings

    found = tables(doubling)
    assert [claim.source for claim in found] == ["Table 1", "Table 1, with a control", "Section 1"]
    assert [claim.agrees for claim in found] == [True, True, None], "the curves meet at less than a doubling"
    # Full precision gains more; and twice the batch is not enough for a bit that is worth twenty points.
    assert [claim.agrees for claim in tables(lambda run: doubling(run) + 0.2 * (run.format == FULL) * (run.batch == 16))] == [
        True, False, None,
    ]  # fmt: skip
    assert [claim.agrees for claim in tables(lambda run: 0.5 + 0.2 * (run.format == "e4m1") - run.batch / 100)] == [
        False, None, None,
    ]  # fmt: skip
