"""What several machines cost the control process, and how much later trials start on them than at home.

    python benchmarks/bench_nodes.py [--agents 64] [--trials 2000] [--rounds 5] [--tls]

The first table: one control process, as `dryfit tune` starts it, and agents without children in one other process,
which answer over the real wire the moment they are asked: a first line, a first step, one report, the end. CPU and
memory are the control process's own, without its children. The second: four real agents beside the same study without
any, by turns; from the event that places a trial to the event that says it has started. All on this machine.
"""

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import psutil

import study_runs
from agents import agents_of
from dryfit.ledger.events import AttemptPlaced, AttemptStarted, TrialFinished
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import read_ledger
from dryfit.processes.agent_link import AgentLink, Meeting, installation, own_identity, read_address, read_token
from dryfit.processes.node import HostMemory, NodeFacts
from dryfit.processes.node_messages import (
    AnswerChild,
    Beat,
    BeatHeard,
    Bye,
    Ended,
    FromControl,
    Hello,
    Identity,
    Refusal,
    Said,
    StartChild,
    Welcome,
)
from dryfit.settings.errors import Evidence
from dryfit.settings.jobs import ChildResult
from dryfit.settings.training_messages import TrainResult
from dryfit.settings.trial import MetricPoint, Outcome
from dryfit.settings.wire import FirstStep, Report, Started, since_boot_s
from dryfit.study.session import read_study

FACTS = NodeFacts(cores=1, host_bytes=1 << 34)
NODES = '\n[execution]\ndevice = "cpu"\n[nodes]\nlocal = false\nslots = 1\ntls = {tls}\n'


@dataclass
class Fake:
    """An agent whose children say all they have to say at once."""

    link: AgentLink
    identity: Identity = field(default_factory=own_identity)
    said_hello: bool = False
    over: bool = False
    beat: int = 0
    beat_s: float = 0.0

    def turn(self) -> None:
        """Hear, answer, and beat."""
        self.link.dial()
        if self.link.is_proved and not self.said_hello:
            self.said_hello = True
            self.link.say(Hello(identity=self.identity, epoch=1, code=installation(), facts=FACTS))
        for message in self.link.hear():
            self._take(message)
        now_s = since_boot_s()
        if self.beat and now_s - self.beat_s > 1.0:
            self._beat(now_s)

    def _take(self, message: FromControl) -> None:
        match message:
            case Welcome():
                self.link.go_on(message.heard)
                self._beat(since_boot_s())
            case BeatHeard():
                self.link.outbox.acknowledge(message.heard)
            case Refusal():
                raise RuntimeError(message.why)
            case Bye():
                self.over = True
            case StartChild() if self.link.inbox.is_new(message.number):
                point = MetricPoint(n=0, step=1, epoch=1.0, value=len(message.key) / 10, metrics={})
                for one in (Started(pid=os.getpid(), overhead_ms=1.0), FirstStep(after_ms=2.0), Report(point=point)):
                    self.link.tell(Said(number=0, key=message.key, message=one))
            case AnswerChild() if self.link.inbox.is_new(message.number):
                result = ChildResult(TrainResult(value=len(message.key) / 10, best=0, steps=1))
                self.link.tell(
                    Ended(number=0, key=message.key, result=result.to_json(), evidence=Evidence(exit_code=0))
                )
            case _:
                pass

    def _beat(self, now_s: float) -> None:
        self.beat, self.beat_s = self.beat + 1, now_s
        memory = HostMemory(FACTS.host_bytes, FACTS.host_bytes)
        self.link.say(Beat(beat=self.beat, heard=self.link.inbox.last, devices={}, memory=memory))


def be_agents(folder: Path, count: int) -> None:
    """Be so many agents of a study until it is over."""
    layout = StudyLayout(folder)
    study_runs.wait_for(layout.node_address.exists)
    address = read_address(layout)
    assert address is not None
    meeting = Meeting(address.host, address.port, read_token(layout.node_token), address.fingerprint)
    fakes = [Fake(AgentLink(lambda: meeting, lambda _fd: None, lambda _fd: None, since_boot_s)) for _ in range(count)]
    while not all(fake.over for fake in fakes):
        for fake in fakes:
            if not fake.over:
                fake.turn()
        fds = [fd for fake in fakes if not fake.over and (fd := fake.link.fileno()) is not None]
        select.select(fds, [], [], 0.2)


@dataclass
class Watched:
    """What a process has taken, as last seen."""

    cpu_s: float = 0.0
    peak_bytes: int = 0

    def until_end(self, process: "subprocess.Popen[str]") -> None:
        """Look at it until it ends."""
        seen = psutil.Process(process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.poll() is None:
                times = seen.cpu_times()
                self.cpu_s = max(self.cpu_s, times.user + times.system)
                self.peak_bytes = max(self.peak_bytes, seen.memory_info().rss)
                time.sleep(0.05)


def write_study(folder: Path, *, trials: int, parallel: int, sampler: str, nodes: str) -> Path:
    """A study of a function that does next to nothing."""
    folder.mkdir(parents=True)
    text = study_runs.objective_study(
        "quadratic",
        study=f"trials = {trials}\nseed = 5",
        space='n = {low = 1, high = 3}\nkind = ["plain", "shifted"]',
        search=f'sampler = "{sampler}"\nmirror = "none"\npruner = "none"',
        runtime=f"parallel = {parallel}",
    )
    (folder / "study.toml").write_text(text + nodes, encoding="utf-8")
    return folder


def replay_s(folder: Path) -> float:
    """CPU seconds in which the study's whole state is read again."""
    began_s = time.process_time()
    read_study(StudyLayout(folder))
    return time.process_time() - began_s


def many_agents(folder: Path, agents: int, trials: int, sampler: str, tls: str) -> None:
    """Print what agents that answer at once leave to one control process."""
    write_study(folder, trials=trials, parallel=agents, sampler=sampler, nodes=NODES.format(tls=tls))
    fakes = subprocess.Popen([sys.executable, __file__, "--be", str(folder), "--agents", str(agents)])
    control = study_runs.start("tune", folder, "--quiet")
    watched = Watched()
    watched.until_end(control)
    if control.returncode != 0 or fakes.wait(60) != 0:
        raise RuntimeError(f"the study ended with {control.returncode}: {control.communicate()[1]}")
    events = read_ledger(StudyLayout(folder).ledger)
    placed = [event.at for event in events if isinstance(event, AttemptPlaced)]
    finished = [event for event in events if isinstance(event, TrialFinished)]
    if sorted(event.number for event in finished if event.outcome is Outcome.COMPLETE) != list(range(trials)):
        raise RuntimeError("not every trial was completed, once")
    size, took_s = StudyLayout(folder).ledger.stat().st_size, max(event.at for event in finished) - min(placed)
    print(
        f"{sampler}, {agents} agents, {trials} trials: {trials / took_s:.1f} trials/s, "
        f"{1000 * watched.cpu_s / trials:.1f} ms CPU a trial (start included), "
        f"peak {watched.peak_bytes / 2**20:.0f} MiB, ledger {size / trials:.0f} bytes a trial, "
        f"replay {replay_s(folder):.2f} s CPU",
        flush=True,
    )


def waits_ms(folder: Path) -> Iterator[float]:
    """Yield how long each trial waited between placement and its first line."""
    placed: dict[tuple[int, int], float] = {}
    for event in read_ledger(StudyLayout(folder).ledger):
        if isinstance(event, AttemptPlaced):
            placed[event.number, event.attempt] = event.at
        elif isinstance(event, AttemptStarted):
            yield 1000 * (event.at - placed[event.number, event.attempt])


def real_agents(folder: Path, rounds: int, trials: int, tls: str) -> None:
    """Print when trials start on four agents, and when without any."""
    found: dict[str, list[float]] = {"here": [], "agents": []}
    for turn in range(rounds):
        for kind, nodes in (("here", '\n[execution]\ndevice = "cpu"\n'), ("agents", NODES.format(tls=tls))):
            study = write_study(folder / f"{kind}-{turn}", trials=trials, parallel=4, sampler="random", nodes=nodes)
            with contextlib.ExitStack() as stack:
                if kind == "agents":
                    stack.enter_context(agents_of(study, 4))
                done = study_runs.run("tune", study, "--quiet")
            if done.returncode != 0:
                raise RuntimeError(done.stderr)
            found[kind] += list(waits_ms(study))
            print(json.dumps({"round": turn, kind: round(statistics.median(list(waits_ms(study))), 1)}), flush=True)
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    p95 = {kind: statistics.quantiles(values, n=20)[-1] for kind, values in found.items()}
    print(
        f"placed to started, median (p95): here {medians['here']:.1f} ms ({p95['here']:.1f}), "
        f"four agents {medians['agents']:.1f} ms ({p95['agents']:.1f}), "
        f"ratio {medians['agents'] / medians['here']:.2f}, {len(found['here'])} trials each"
    )


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", action="store_true", help="over TLS")
    parser.add_argument("--be", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be is not None:
        be_agents(options.be, options.agents)
        return
    tls = str(options.tls).lower()
    with tempfile.TemporaryDirectory() as name:
        for sampler in ("random", "tpe"):
            many_agents(Path(name) / sampler, options.agents, options.trials, sampler, tls)
        real_agents(Path(name) / "real", options.rounds, 40, tls)


if __name__ == "__main__":
    main()
