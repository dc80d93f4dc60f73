"""What a trial costs the control process: CPU time of its whole loop, after 1 000 and after 5 000 trials.

    python benchmarks/bench_control.py [--trials 1000 5000] [--more 20] [--profile]

The study's own loop, ledger and observers; children are played by a script that says what real ones say (four reports
and checkpoints each) the moment it is asked. So nothing is measured but what the control process computes itself; the
fsync of each event is waiting, not computing. Asking is the suggestion and its event, a verdict is a report's, telling
is the end of the trial with all that follows from it.
"""

import argparse
import contextlib
import cProfile
import os
import pstats
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import long_study

import ledgers
from dryfit.documents.live_progress import LiveDisplay
from dryfit.ledger.events import Event, SessionOpened, TrialFinished
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import Ledger
from dryfit.ledger.replay import StudyState
from dryfit.processes.child_spec import ChildEvent, ChildExited, ChildMessage, ChildSpec
from dryfit.processes.node import LocalNode, NodeFacts
from dryfit.search.space import Space
from dryfit.settings.devices import HERE
from dryfit.settings.errors import Evidence
from dryfit.settings.jobs import ChildResult
from dryfit.settings.study_file import PrunerName, SamplerName, StudyConfig
from dryfit.settings.training_messages import StopReason, TrainRequest, TrainResult
from dryfit.settings.trial import MetricPoint
from dryfit.settings.wire import Checkpointed, FirstStep, Progress, Report, Started, Verdict
from dryfit.study.context import StudyContext
from dryfit.study.driver import StopRequests
from dryfit.study.loop import AttemptFinalizer, TrialDecider
from dryfit.study.messages import MessageHandler
from quiet_children import QuietChildren

PARTS: dict[str, tuple[type, str]] = {
    "ask": (TrialDecider, "_ask"),
    "verdict": (MessageHandler, "_verdict"),
    "tell": (AttemptFinalizer, "on_exit"),
}


@dataclass
class Played(QuietChildren):
    """Children that a script plays."""

    draw: random.Random
    events: deque[ChildEvent] = field(default_factory=deque[ChildEvent])
    values: dict[str, float] = field(default_factory=dict[str, float])

    def start(self, spec: ChildSpec) -> None:
        """Begin a trial: it trains to its first report."""
        assert isinstance(spec.body, TrainRequest)
        self.values[spec.key] = long_study.values(dict(spec.body.config.params), self.draw)[0]
        for message in (Started(pid=1, overhead_ms=10.0), FirstStep(after_ms=50.0)):
            self.events.append(ChildMessage(spec.key, message))
        self._report(spec.key, 0)

    def answer(self, key: str, verdict: Verdict) -> None:
        """Go on to the next report, or end."""
        n, value = verdict.n, self.values[key]
        self.events.append(ChildMessage(key, Checkpointed(step=20 * (n + 1))))
        if verdict.proceed and n + 1 < long_study.REPORTS:
            self._report(key, n + 1)
            return
        stopped = None if verdict.proceed else StopReason.VERDICT
        result = TrainResult(value=value, best=n, steps=20 * (n + 1), stopped_by=stopped)
        self.events.append(ChildExited(key, ChildResult(train=result), Evidence(exit_code=0)))

    def _report(self, key: str, n: int) -> None:
        point = MetricPoint(
            n=n, step=20 * (n + 1), epoch=n + 1.0, value=self.values[key] * (0.6 + 0.1 * (n + 1)), metrics={}
        )
        step = Progress(step=point.step, total_steps=80, epoch=point.epoch, loss=1.0)
        self.events += [ChildMessage(key, step), ChildMessage(key, Report(point=point))]

    def wait(self, timeout_s: float) -> list[ChildEvent]:
        """The next thing said."""
        return [self.events.popleft()] if self.events else []


@contextlib.contextmanager
def timed() -> Iterator[dict[str, list[float]]]:
    """Time the parts of the loop while the block runs."""
    costs: dict[str, list[float]] = {name: [] for name in PARTS}

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def part(*args: Any) -> Any:
            began_s = time.process_time()
            try:
                return real(*args)
            finally:
                costs[name].append(1000 * (time.process_time() - began_s))

        return part

    real = {name: getattr(owner, method) for name, (owner, method) in PARTS.items()}
    for name, (owner, method) in PARTS.items():
        setattr(owner, method, wrap(name, real[name]))
    try:
        yield costs
    finally:
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, real[name])


class Ends:
    """Notes the CPU time at which each trial ended."""

    def __init__(self) -> None:
        self.at_ms: list[float] = []

    def on_open(self, layout: StudyLayout) -> None: ...
    def on_message(self, number: int, message: object) -> None: ...
    def on_note(self, text: str) -> None: ...

    def on_event(self, event: Event, state: StudyState) -> None:
        if isinstance(event, TrialFinished):
            self.at_ms.append(1000 * time.process_time())

    def costs_ms(self) -> list[float]:
        """What each trial after the first took in all."""
        return [end - begin for begin, end in pairwise(self.at_ms)]


def go_on(folder: Path, config: StudyConfig, space: Space, more: int) -> dict[str, list[float]]:
    """Go on with a study for some trials: CPU milliseconds of each part, and of each trial in all."""
    layout, state = StudyLayout(folder), StudyState()
    ledger = Ledger(layout.ledger, apply=state.apply)
    before = len(state.trials)
    ledger.append(SessionOpened(pid=os.getpid(), host="here", version="0", total=before + more + 1))
    played = Played(random.Random(before))
    stops = StopRequests(layout.stop_request, played.wake)

    ends = Ends()
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere), timed() as costs:
        trials = config.study.model_copy(update={"trials": state.counted + more + 1})
        config = config.model_copy(update={"study": trials})
        study = StudyContext(
            config=config,
            layout=layout,
            space=space,
            ledger=ledger,
            state=state,
            resolved=ledgers.resolved(),
            nodes={HERE: NodeFacts(cores=1, host_bytes=2**36)},
        )
        TrialDecider(study, LocalNode(played), stops, [LiveDisplay(), ends]).run()
    ledger.close()
    # The first trial imports what a sampler needs, and goes through the whole history.
    per_trial = {name: found[1 if name == "ask" else len(found) // (more + 1) :] for name, found in costs.items()}
    return {**per_trial, "whole": ends.costs_ms()}


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Every sampler without a pruner, and every pruner behind random points."""
    samplers = [(f"{name}", {"sampler": name, "pruner": "none"}) for name in SamplerName]
    pruners = [(f"random, {name}", {"sampler": "random", "pruner": name}) for name in PrunerName if name != "none"]
    return [
        *samplers,
        *pruners,
        ("random, patient of asha", {"sampler": "random", "pruner": "patient", "patient_of": "asha"}),
    ]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--more", type=int, default=20, help="trials that are measured")
    parser.add_argument("--profile", action="store_true", help="print where the time of each case goes")
    parser.add_argument("--case", default="", help="only cases that begin so")
    options = parser.parse_args()
    space = long_study.space()
    print("CPU ms: median of the asks, verdicts and tells; whole: everything, a trial")
    print("                          trials     ask  verdict    tell   whole")
    with tempfile.TemporaryDirectory() as temporary:
        written = {}
        for count in options.trials:
            written[count] = long_study.script(count).write(Path(temporary) / f"of-{count}")
        for name, search in (case for case in cases() if case[0].startswith(options.case)):
            for count in options.trials:
                folder = Path(shutil.copytree(written[count], Path(temporary) / "study"))
                config = long_study.config(search={**search, "mirror": "none"})
                profile = cProfile.Profile()
                with profile if options.profile else contextlib.nullcontext():
                    costs = go_on(folder, config, space, options.more)
                medians = [statistics.median(costs[part]) for part in (*PARTS, "whole")]
                ask, verdict, tell, whole = medians
                print(f"{name:25s} {count:6d}  {ask:6.1f}   {verdict:6.2f}  {tell:6.2f}  {whole:6.1f}", flush=True)
                if options.profile:
                    pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
