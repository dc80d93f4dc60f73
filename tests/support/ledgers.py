"""Ledgers of studies that never ran: every kind of end, failure, refusal and session, as real events in a real file."""

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

import plan_jobs
from dryfit.ledger.events import (
    AttemptEnded,
    AttemptPlaced,
    AttemptStarted,
    CheckpointMade,
    Event,
    FailureFacts,
    FirstStepDone,
    Observed,
    ReportMade,
    Resolved,
    SessionClosed,
    SessionOpened,
    StudyCreated,
    TrialAsked,
    TrialFinished,
    TrialPlanned,
    VerdictGiven,
)
from dryfit.ledger.replay import StudyState
from dryfit.search.space import Distribution, apply_params, to_text
from dryfit.settings.choices import BuiltInTask, Direction, Metric
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.execution import ExecutionSettings, PlanSubject
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest
from dryfit.settings.tables import TrialSettings
from dryfit.settings.training_messages import ResolveResult, SplitFacts
from dryfit.settings.trial import Goal, MetricPoint, Outcome, Scalar

BEGAN_S = 1_760_000_000.0
DEVICE = DeviceSpec(name="made-up 1 GiB", kind=DeviceKind.CUDA, capacity_bytes=2**30)

SPACE: dict[str, Distribution] = {
    "optim.lr": FloatDistribution(1e-6, 1e-3, log=True),
    "head.pooling": CategoricalDistribution(["cls", "mean", "max"]),
    "loss.name": CategoricalDistribution(["cross_entropy", "focal"]),
    "train.batch_size": CategoricalDistribution([8, 16, 32]),
    "train.max_length": IntDistribution(8, 131072),
    "head.dropout": FloatDistribution(0.0, 0.5),
}
FOCAL: dict[str, Distribution] = {"loss.gamma": FloatDistribution(0.5, 5.0)}
"""Drawn only where the loss is focal."""


@dataclass
class Script:
    """Writes a study's story, second by second."""

    events: list[Event] = field(default_factory=list)
    now_s: float = BEGAN_S

    def say(self, event: Event, after_s: float = 0.1) -> None:
        """Something happens a little later."""
        self.now_s += after_s
        self.events.append(event.model_copy(update={"seq": len(self.events), "at": self.now_s}))

    def begin(self, *, name: str = "made-up", also: Sequence[Goal] = (), metric: str = Metric.F1_MACRO) -> None:
        """The study, its first session, and what its data is."""
        created = StudyCreated(
            id="0123456789abcdef",
            name=name,
            task=BuiltInTask.CRITERIA,
            metric=metric,
            direction=Direction.MAXIMIZE,
            also=tuple(also),
            seed=7,
            space="[]",
        )
        self.say(created)
        self.open()
        self.say(Resolved(result=resolved()), 4)

    def open(self, notes: tuple[str, ...] = (), total: int = 40) -> None:
        """A control process takes over."""
        self.say(SessionOpened(pid=1, host="box", version="0.1.0", total=total, notes=notes))

    def close(self, reason: str = "done") -> None:
        """It leaves."""
        self.say(SessionClosed(reason=reason))

    def ask(self, number: int, params: dict[str, Scalar], spaces: dict[str, Distribution] | None = None) -> None:
        """A trial is drawn."""
        every = {**{name: CategoricalDistribution([value]) for name, value in params.items()}, **SPACE, **FOCAL}
        distributions = {name: to_text({**every, **(spaces or {})}[name]) for name in params}
        self.say(
            TrialAsked(
                number=number,
                params=params,
                internal=params,
                distributions=distributions,
                seed=1000 + number,
                fingerprint=f"f{number}",
            )
        )

    def plan(self, number: int, params: dict[str, Scalar]) -> PlanAnswer:
        """It is planned by the made-up memory model."""
        subject = PlanSubject(task=BuiltInTask.CRITERIA, settings=apply_params(TrialSettings(), params))
        request = PlanRequest(subjects=(subject,), device=DEVICE, execution=ExecutionSettings(), trace_dir="")
        answer = plan_jobs.answer(subject, request)
        key = json.dumps([params.get("train.batch_size"), params.get("train.max_length")])
        self.say(TrialPlanned(number=number, key=key, answer=answer), 1)
        return answer

    def place(self, number: int, attempt: int = 1, device: str | None = None) -> None:
        """A process for it."""
        self.say(AttemptPlaced(number=number, attempt=attempt, device=device))
        self.say(AttemptStarted(number=number, attempt=attempt, pid=100 + number, overhead_ms=12.0))
        self.say(FirstStepDone(number=number, attempt=attempt, after_ms=700.0), 1)

    def report(self, number: int, n: int, value: float, attempt: int = 1, **verdict: Any) -> None:
        """A validation."""
        point = MetricPoint(n=n, step=20 * (n + 1), epoch=n + 1.0, value=value, metrics={"loss": 1 - value})
        self.say(ReportMade(number=number, attempt=attempt, point=point), 5)
        self.say(VerdictGiven(number=number, n=n, proceed=True, **verdict))
        self.say(CheckpointMade(number=number, attempt=attempt, step=20 * (n + 1)))

    def fail(self, number: int, attempt: int, kind: FailureKind, sentence: str, action: Action) -> None:
        """A process ends badly."""
        facts = FailureFacts(kind=kind, sentence=sentence, action=action)
        self.say(AttemptEnded(number=number, attempt=attempt, failure=facts), 2)

    def finish(self, number: int, outcome: Outcome, value: float | None = None, **facts: Any) -> None:
        """The trial's end."""
        self.say(TrialFinished(number=number, outcome=outcome, value=value, **facts))

    def complete(self, number: int, params: dict[str, Scalar], values: Sequence[float], **facts: Any) -> None:
        """A whole trial without trouble."""
        self.ask(number, params)
        self.place(number, device=facts.pop("device", None))
        for n, value in enumerate(values):
            self.report(number, n, value)
        self.say(AttemptEnded(number=number, attempt=1), 1)
        self.finish(number, Outcome.COMPLETE, values[-1], best=len(values) - 1, steps=20 * len(values), **facts)

    def state(self) -> StudyState:
        """The fold."""
        return fold(self.events)

    def write(self, folder: Path) -> Path:
        """The ledger in a study's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [event.model_dump_json() for event in self.events]
        (folder / "ledger.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return folder


def begun(**facts: Any) -> Script:
    """A study that has begun, with its first session."""
    script = Script()
    script.begin(**facts)
    return script


def done(folder: Path, *values: float, params: dict[str, Scalar] | None = None) -> Path:
    """A study named as its folder that is done, with one complete trial for each value."""
    script = begun(name=folder.name)
    for number, value in enumerate(values):
        script.ask(number, params or {"head.dropout": 0.1})
        script.place(number)
        script.finish(number, Outcome.COMPLETE, value)
    script.close()
    return script.write(folder)


def fold(events: Iterable[Event]) -> StudyState:
    """The state after some events."""
    state = StudyState()
    for event in events:
        state.apply(event)
    return state


def resolved() -> ResolveResult:
    """Made-up data, models and versions."""
    return ResolveResult(
        data_fingerprint="d0d0cafe",
        splits={
            "train": SplitFacts(rows=800, label_counts={0: 600, 1: 200}),
            "validation": SplitFacts(rows=200, label_counts={0: 150, 1: 50}),
        },
        revisions={"minilm": "abc123"},
        device=DeviceKind.CPU,
        device_count=0,
        versions={"torch": "2.13.0", "transformers": "5.23.0"},
    )


def drawn(source: random.Random) -> dict[str, Scalar]:
    """A random point of the space."""
    loss = source.choice(["cross_entropy", "focal"])
    params: dict[str, Scalar] = {
        "optim.lr": 10 ** source.uniform(-6, -3),
        "head.pooling": source.choice(["cls", "mean", "max"]),
        "loss.name": loss,
        "train.batch_size": source.choice([8, 16, 32]),
        "head.dropout": source.uniform(0, 0.5),
    }
    return params | ({"loss.gamma": source.uniform(0.5, 5)} if loss == "focal" else {})


def score(params: dict[str, Scalar], source: random.Random) -> float:
    """A made-up metric in which the learning rate decides most, the pooling a little, the dropout nothing."""
    lr = params["optim.lr"]
    assert isinstance(lr, float)
    far = abs(math.log10(lr) + 4.3)
    return max(0.05, 0.86 - 0.14 * far + 0.03 * (params["head.pooling"] == "mean") + source.gauss(0, 0.01))


def eventful(trials: int = 40, seed: int = 5) -> Script:
    """Everything at once: prunes, failures, retries, refusals, a killed session, a night's pause, a running trial."""
    source, script = random.Random(seed), Script()
    script.begin()
    for number in range(trials):
        params = drawn(source)
        if number == trials // 3:  # the control process is killed with a trial in it
            script.ask(number, params)
            script.place(number)
            script.report(number, 0, 0.5)
            script.now_s += 9 * 3600
            script.open(("ended 1 process(es) that an earlier run left behind",))
            script.fail(number, 1, FailureKind.LOST, "the control process vanished", Action.RETRY)
            script.place(number, 2)
            script.report(number, 1, 0.71, attempt=2)
            script.say(AttemptEnded(number=number, attempt=2), 1)
            script.finish(number, Outcome.COMPLETE, 0.71, best=1, steps=40)
            continue
        _one(script, number, params, source)
    script.ask(trials, drawn(source))
    script.place(trials)
    script.report(trials, 0, 0.61)
    return script


def _one(script: Script, number: int, params: dict[str, Scalar], source: random.Random) -> None:
    value = score(params, source)
    values = [value * share for share in (0.55, 0.7, 0.85, 1.0)]
    match number % 10:
        case 4:
            script.ask(number, params)
            script.place(number)
            script.report(number, 0, value * 0.5)
            script.say(AttemptEnded(number=number, attempt=1), 1)
            script.finish(number, Outcome.PRUNED, reason="below the median at step 20", steps=20)
        case 6:
            big = params | {"train.batch_size": 32, "train.max_length": 40000 + 1000 * (number % 3)}
            script.ask(number, big)
            script.plan(number, big)
            script.finish(number, Outcome.REFUSED, reason="needs 1.2 GiB, made-up 1 GiB has 1.0 GiB")
        case 7:
            script.ask(number, params)
            script.place(number)
            script.fail(number, 1, FailureKind.NATIVE_CRASH, "SIGSEGV in the first step", Action.RETRY)
            script.place(number, 2)
            script.report(number, 0, value, attempt=2)
            script.say(AttemptEnded(number=number, attempt=2), 1)
            script.finish(number, Outcome.COMPLETE, value, best=0, steps=20)
        case 9:
            script.ask(number, params)
            script.place(number)
            script.fail(number, 1, FailureKind.USER_CODE, "ValueError: labels <b>& more</b>", Action.GIVE_UP)
            script.finish(number, Outcome.FAILED, reason="user_code: ValueError")
        case _:
            script.ask(number, params)
            answer = script.plan(number, params | {"train.max_length": 16 + number % 16})
            script.place(number)
            for n, reported in enumerate(values):
                script.report(number, n, reported)
            script.say(AttemptEnded(number=number, attempt=1), 1)
            assert answer.memory is not None and answer.verdict is not VerdictKind.REFUSED
            seen = Observed(allocated_bytes=int(answer.memory.peak_allocated_bytes * source.uniform(0.9, 1.02)))
            script.finish(number, Outcome.COMPLETE, value, best=3, steps=80, observed=seen)
