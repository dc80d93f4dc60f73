"""The process that runs an agent on each present and future node of a Ray cluster.

``python -m dryfit.processes.ray_agents FOLDER ADDRESS PARENT``. The control process itself never imports Ray. The
study hears of an agent from the agent; here it only matters whether its node needs another one.
"""

# pyright: basic

import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dryfit.ledger.folder import StudyLayout
from dryfit.processes.process import die_with_parent

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    sys.exit("Ray is not installed: pip install 'dryfit[ray]'")


CONNECTED = "connected"
"""What begins the line on stdout that says that a cluster was found."""
_LOOK_EVERY_S = 1.0
_PAUSE_MOST_S = 60.0
_END_S = 4.0


class AgentActor:
    """Holds a whole node of Ray's for an agent, which runs as a process of its own."""

    def run(self, folder: str, log: str) -> int:
        """Run an agent until it ends; return its exit status. It is killed with the thread that runs this."""
        command = [sys.executable, "-P", "-m", "dryfit.processes.bound_agent", folder, str(os.getpid())]
        with Path(log).open("ab") as out:
            return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False).returncode


@dataclass(slots=True)
class _Held:
    """What runs on a node, and how often in a row it did for a short time only."""

    actor: Any = None
    run: Any = None
    begun_s: float = 0.0
    short: int = 0

    def pause_s(self) -> float:
        return min(_PAUSE_MOST_S, 2.0**self.short)


class RayAgents:
    """An agent on each node of a cluster that this process is connected to.

    Args:
        layout: The study's folder.
    """

    def __init__(self, layout: StudyLayout) -> None:
        self._layout = layout
        self._held: dict[str, _Held] = {}

    def look(self) -> None:
        """Start agents on nodes that have none; note what has ended."""
        now_s = time.monotonic()
        alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        for name in set(self._held) - set(alive):
            self._held.pop(name)
            _note(f"node {name[:8]} is gone")
        for name, resources in alive.items():
            held = self._held.setdefault(name, _Held())
            if held.run is not None and ray.wait([held.run], timeout=0)[0]:
                _note(f"node {name[:8]}: {_ended(held.run)}")
                held.short = held.short + 1 if now_s - held.begun_s < _PAUSE_MOST_S else 0
                held.actor = held.run = None
            if held.run is None and now_s - held.begun_s > held.pause_s():
                held.begun_s = now_s
                self._start(name, resources, held)

    def end(self) -> None:
        """Let agents end by themselves for a moment, which were told that the study is over; then end them."""
        runs = [held.run for held in self._held.values() if held.run is not None]
        if runs:
            ray.wait(runs, num_returns=len(runs), timeout=_END_S)
        for held in self._held.values():
            if held.actor is not None:
                ray.kill(held.actor)

    def _start(self, name: str, resources: dict[str, float], held: _Held) -> None:
        made = ray.remote(AgentActor).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=name, soft=False),
            max_restarts=0,
        )
        held.actor = made.remote()
        log = self._layout.nodes / f"ray-{name[:8]}.txt"
        held.run = held.actor.run.remote(str(self._layout.folder), str(log))


def _note(text: str) -> None:
    """Say what happens to the log; nobody reads stdout any more."""
    print(text, file=sys.stderr, flush=True)


def _ended(run: Any) -> str:
    """Return how a run has ended, in words."""
    try:
        return f"its agent ended with status {ray.get(run)}"
    except RayError as error:
        return f"its agent is lost: {type(error).__name__}"


def main() -> None:
    """Serve a study until SIGTERM, or the end of the process that began this."""
    folder, address, parent = sys.argv[1:]
    die_with_parent(int(parent))
    over = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        over.set()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the study, whose end is this process's
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        sys.exit(f"no cluster is found at {shlex.quote(address)}: {error}")
    signal.signal(signal.SIGTERM, stop)  # after Ray has set its own handler
    agents = RayAgents(StudyLayout(Path(folder)))
    print(f"{CONNECTED} to Ray {ray.__version__}: {len(ray.nodes())} node(s)", flush=True)
    try:
        while not over.wait(_LOOK_EVERY_S):
            agents.look()
    finally:
        agents.end()
        ray.shutdown()


if __name__ == "__main__":
    main()
