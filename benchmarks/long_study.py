"""Long studies that never ran: fifteen keys in three groups of conditions, and a ledger of thousands of trials."""

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import ledgers
from dryfit.ledger.events import AttemptEnded, Resolved, StudyCreated, TrialAsked
from dryfit.search.samplers import Suggestion, suggest
from dryfit.search.space import Space
from dryfit.settings.choices import BuiltInTask, Direction, Metric
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.study_file import SamplerName, SearchSettings, StudyConfig
from dryfit.settings.trial import Outcome, TrialRecord

SEED = 1
SPACE = {
    "model.name": ["bert", "roberta", "deberta"],
    "train.batch_size": [
        {"choices": [16, 32, 64], "when": {"model.name": "bert"}},
        {"choices": [8, 16, 32], "when": {"model.name": ["roberta", "deberta"]}},
    ],
    "optim.lr": {"low": 1e-6, "high": 1e-3, "log": True},
    "optim.weight_decay": {"low": 0.0, "high": 0.3},
    "optim.layer_decay": {"low": 0.6, "high": 1.0},
    "sched.name": ["linear", "cosine", "constant"],
    "sched.warmup_ratio": {"low": 0.0, "high": 0.3},
    "head.pooling": ["cls", "mean", "max"],
    "head.layers": {"low": 0, "high": 3},
    "head.hidden": {"choices": [128, 256, 512], "when": {"head.layers": [1, 2, 3]}},
    "head.activation": {"choices": ["gelu", "relu", "tanh"], "when": {"head.layers": [1, 2, 3]}},
    "head.dropout": {"low": 0.0, "high": 0.5},
    "loss.label_smoothing": {"low": 0.0, "high": 0.2},
    "train.epochs": {"low": 2, "high": 8},
    "regularization.dropout": {"low": 0.0, "high": 0.3},
}
GOALS = (Direction.MAXIMIZE, Direction.MINIMIZE)
REPORTS = 4


def config(**tables: dict[str, Any]) -> StudyConfig:
    """A study file with this space."""
    data = {"train": "a.jsonl", "validation": "b.jsonl"}
    return StudyConfig.model_validate_json(json.dumps({"space": SPACE, "data": data, **tables}))


def space() -> Space:
    """The space itself."""
    return Space.from_config(config())


def point(made: Space, number: int) -> Suggestion:
    """A random point of it."""
    return suggest(
        made, [], search=SearchSettings(sampler=SamplerName.RANDOM), directions=GOALS, points=(), seed=SEED,
        number=number,
    )  # fmt: skip


def values(params: dict[str, Any], draw: random.Random) -> tuple[float, float]:
    """Two goals that depend on the parameters and pull two ways."""
    decay = params["optim.weight_decay"]
    return decay - params["head.dropout"] ** 2 + draw.gauss(0, 0.05), decay + draw.gauss(0, 0.05)


def records(made: Space, count: int) -> list[TrialRecord]:
    """Ended trials at random points; one in ten was refused."""
    draw, found = random.Random(SEED), list[TrialRecord]()
    for number in range(count):
        drawn = point(made, number)
        value, other = values(drawn.params, draw)
        refused = draw.random() < 0.1
        outcome = Outcome.REFUSED if refused else Outcome.COMPLETE
        also = () if refused else (other,)
        found.append(
            TrialRecord(number, drawn.internal, drawn.distributions, outcome, None if refused else value, also=also)
        )
    return found


def script(trials: int) -> ledgers.Script:
    """A study's story: reports, verdicts, rungs and checkpoints; every fifth trial is pruned, some begin twice."""
    made, draw, told = space(), random.Random(SEED), ledgers.Script()
    created = StudyCreated(
        id="0123456789abcdef", name="long", task=BuiltInTask.CRITERIA, metric=Metric.F1_MACRO,
        direction=Direction.MAXIMIZE, seed=SEED, space=made.to_json(),
    )  # fmt: skip
    told.say(created)
    told.open(total=trials)
    told.say(Resolved(result=ledgers.resolved()))
    for number in range(trials):
        _trial(told, number, point(made, number), draw)
    return told


def _trial(told: ledgers.Script, number: int, drawn: Suggestion, draw: random.Random) -> None:
    asked = TrialAsked(
        number=number, params=drawn.params, internal=drawn.internal, distributions=drawn.distributions,
        seed=number, fingerprint=f"{number:016x}",
    )  # fmt: skip
    told.say(asked)
    attempt = 1
    told.place(number)
    if number % 20 == 7:
        told.fail(number, 1, FailureKind.NATIVE_CRASH, "SIGSEGV in the first step", Action.RETRY)
        attempt = 2
        told.place(number, 2)
    value, _ = values(drawn.params, draw)
    pruned = number % 5 == 4
    for n in range(1 if pruned else REPORTS):
        reported = value * (0.6 + 0.1 * (n + 1))
        told.report(
            number, n, reported, attempt, system_attrs={f"completed_rung_{n}": reported}, reason="decides no rung"
        )
    told.say(AttemptEnded(number=number, attempt=attempt))
    if pruned:
        told.finish(number, Outcome.PRUNED, steps=20, best=0, reason="not among the best 1/3 of its rung at report 0")
    else:
        told.finish(number, Outcome.COMPLETE, value, steps=20 * REPORTS, best=REPORTS - 1)
