"""A machine with invented devices on which stand-in trials run, and a clock that moves while nothing happens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import instant
import plan_jobs
from dryfit.processes.node import DeviceFacts
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.study.context import StudyContext
from nvml import ScriptedDevices

GIB, MIB = 2**30, 2**20
NEED = 128 * MIB
"""What a trial of eight rows of sixteen tokens is planned with (:mod:`plan_jobs`)."""

OTHER = 4242
PID = 1
"""What stand-in children say they are."""


@dataclass
class Watcher:
    """Hears notes."""

    notes: list[str] = field(default_factory=list)
    heard: Callable[[Any], None] = lambda _: None

    def on_open(self, layout: Any) -> None: ...

    def on_event(self, event: Any, state: Any) -> None:
        self.heard(event)

    def on_message(self, number: int, message: Any) -> None: ...

    def on_note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class Bench:
    """A machine with devices on which stand-in trials run, and a clock that moves while nothing happens.

    Attributes:
        specs: Its devices; ``count`` of one kind where there are none.
    """

    folder: Path
    capacity_bytes: int
    count: int = 1
    now_s: float = 1000.0
    devices: ScriptedDevices = field(default_factory=ScriptedDevices)
    watcher: Watcher = field(default_factory=Watcher)
    on_idle: Callable[[], None] = lambda: None
    idled: int = 0
    tick_s: float = 0.1
    specs: Sequence[DeviceSpec] = ()

    def __post_init__(self) -> None:
        self.specs = self.specs or [DeviceSpec(name="made up", capacity_bytes=self.capacity_bytes)] * self.count
        for name, spec in enumerate(self.specs):
            self.devices.set(str(name), spec.capacity_bytes)

    def on_cuda(self, study: StudyContext) -> StudyContext:
        found = {"device": DeviceKind.CUDA, "device_count": len(self.specs), "device_spec": self.specs[0]}
        devices = [DeviceFacts(str(index), spec=spec) for index, spec in enumerate(self.specs)]
        resolved = study.resolved.model_copy(update=found)
        return replace(study, resolved=resolved, nodes=instant.one_node(16, *devices))

    def clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def idle(self) -> None:
        self.now_s += 10.0
        self.idled += 1
        assert self.idled < 2000, "the study waits for ever"
        self.on_idle()

    def run(
        self, *, host: Any = None, placed: Any = None, script: Any = None, answerer: Any = None, **tables: Any
    ) -> instant.Run:
        known = {
            "execution": {"memory_limit": None},
            "train": {"batch_size": 8, "max_length": 16},
            "runtime": {"parallel": 4},
        }
        seen = {name: hears for name, hears in (("host", host), ("placed", placed)) if hears is not None}
        return instant.run(
            self.folder,
            instant.config(**(known | tables)),
            change=self.on_cuda,
            idle=self.idle,
            script=script or (lambda _: None),
            answerer=answerer or plan_jobs.answer,
            devices=self.devices,
            **seen,
            clock=self.clock,
            observers=[self.watcher],
        )


def events_of(done: instant.Run, kind: type) -> list[Any]:
    return [event for event in done.events if isinstance(event, kind)]
