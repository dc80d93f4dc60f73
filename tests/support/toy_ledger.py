"""A ledger written by hand, with every kind of end of a trial."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, distribution_to_json

LR = distribution_to_json(FloatDistribution(1e-5, 1e-1, log=True))


class Ledger:
    """Appends events as the store would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seq = 0
        self.after_add: Callable[[], object] = lambda: None
        facts = {"id": "toy-1", "task": "objective", "metric": "value", "seed": 0, "space": "[]"}
        self.add("study_created", name="toy", direction="maximize", **facts)

    def add(self, kind: str, **fields: Any) -> None:
        event = {"seq": self.seq, "at": 1_700_000_000.0 + self.seq, "type": kind, **fields}
        self.seq += 1
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")
        self.after_add()

    def ask(self, number: int, choices: tuple[int, ...] = (8, 16)) -> None:
        public = {"optim.lr": 0.001 * (number + 1), "train.batch_size": choices[number % 2]}
        internal = {"optim.lr": public["optim.lr"], "train.batch_size#0": public["train.batch_size"]}
        batch = distribution_to_json(CategoricalDistribution(choices))
        distributions = {"optim.lr": LR, "train.batch_size#0": batch}
        facts = {"params": public, "internal": internal, "distributions": distributions}
        self.add("trial_asked", number=number, seed=number, fingerprint=str(number), **facts)
        self.add("attempt_placed", number=number, attempt=1)

    def report(self, number: int, n: int, value: float, attrs: dict[str, float] | None = None) -> None:
        point = {"n": n, "step": n, "epoch": float(n), "value": value, "metrics": {}}
        self.add("report", number=number, attempt=1, point=point)
        self.add("verdict", number=number, n=n, proceed=True, system_attrs=attrs or {})

    def finish(self, number: int, outcome: str, value: float | None = None, reason: str = "") -> None:
        self.add("trial_finished", number=number, outcome=outcome, value=value, reason=reason)

    def whole_study(self) -> Iterator[None]:
        """Every kind of end; yields after each trial."""
        for number, outcome in enumerate(["complete", "pruned", "failed", "refused", "cancelled", "complete"]):
            self.ask(number)
            if outcome != "refused":
                self.report(number, 0, 0.1 * number, {"completed_rung_0": 0.1 * number})
                self.report(number, 1, float("nan") if number == 4 else 0.2 * number)
            if outcome == "failed":
                failure = {"kind": "killed", "sentence": "SIGKILL", "action": "retry"}
                self.add("attempt_ended", number=number, attempt=1, failure=failure)
                self.add("attempt_placed", number=number, attempt=2)
            self.finish(number, outcome, 0.5 + number if outcome == "complete" else None, f"because {outcome}")
            yield
        self.ask(6)
        self.report(6, 0, 0.75)
        yield
