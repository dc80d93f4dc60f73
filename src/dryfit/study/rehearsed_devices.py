"""Rehearse a command for several devices: once for those on which it does the same.

Devices of one compute capability have the same kernels and workspaces. The largest of them is rehearsed, and the
recording replayed on the others. Two things need a further rehearsal: a script that asks what distinguishes devices,
and an allocation that a device refuses, because a script may catch that error. Of devices that refuse at the same line
one is rehearsed: if the script does not catch it there, it ends there on the others too.
"""

import re
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from dryfit.processes.node import device_of
from dryfit.processes.rehearsal_process import RehearsalInterrupted
from dryfit.processes.rehearsal_stem import shared_imports
from dryfit.processes.rehearsed_command import ScriptCommand
from dryfit.settings.choices import Emitted
from dryfit.settings.device_answers import DeviceAnswer, DeviceAnswers
from dryfit.settings.devices import parse_device
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.rehearsal_messages import OutOfMemory, RehearsalAnswer, ScriptEnd
from dryfit.settings.study_file_reading import read_toml
from dryfit.study.rehearsals import (
    PreparedRehearsal,
    RehearsalOptions,
    demand_cuda,
    joined,
    lacks_needs,
    prepare,
    with_ladder,
    with_needs,
    with_run,
)


def rehearse_devices(command: ScriptCommand, options: RehearsalOptions, devices: Sequence[DeviceSpec]) -> DeviceAnswers:
    """Rehearse a command for several devices; each answer is that of a rehearsal for this device alone.

    Args:
        options: ``device`` is not looked at.
        devices: Each once; none: this machine's first GPU.

    Raises:
        ConfigError: As of :func:`~dryfit.study.rehearsals.rehearse`.
        ChildError: An answer cannot be read.
    """
    began_s = time.monotonic()
    devices = devices or (device_of(None),)
    prepared = prepare(command, options, demand_cuda(devices[0]))
    shared = _Shared(prepared)
    interrupted = False
    try:
        with shared_imports():
            for group in _groups(map(demand_cuda, devices)):
                shared.rehearse(group)
    except RehearsalInterrupted as error:
        interrupted = True
        shared.keep_seen(error.answer)
    known = [shared.found[one.name] for one in devices if one.name in shared.found]
    found = tuple(replace(one, answer=with_run(one.answer, options)) for one in known)
    return DeviceAnswers(found, shared.rehearsals, time.monotonic() - began_s, interrupted)


def request_table(form: Emitted | None, file: Path | None) -> dict[str, dict[str, str]]:
    """Read what a cluster calls its devices: ``a100-80 = { gres = "a100", constraint = "gpu80gb" }``.

    Returns:
        By the names of :func:`~dryfit.settings.devices.device_names`; empty where the form needs none.

    Raises:
        ConfigError: The form and the file do not go together, or the file is wrong.
    """
    doing = "making a request of a device"
    if (form is Emitted.SBATCH) is not (file is not None):
        raise ConfigError(doing, "--emit-table and --emit sbatch one without the other", "both, or neither")
    if file is None:
        return {}
    hint = 'a100-80 = { gres = "a100", constraint = "gpu80gb" }'
    found: dict[str, dict[str, str]] = {}
    for text, named in read_toml(file, "a table of devices", hint).items():
        words = cast("dict[str, object]", named) if isinstance(named, dict) else {}
        if not words or words.keys() - {"gres", "constraint"} or not all(_is_word(one) for one in words.values()):
            raise ConfigError(f"reading {file}", f"{text} = {named!r}", "gres and constraint, words of Slurm", hint)
        found[parse_device(text).name] = {key: str(one) for key, one in words.items()}
    return found


def _is_word(value: object) -> bool:
    """Whether a value can stand in a Slurm script as it is."""
    return isinstance(value, str) and re.fullmatch(r"[\w.:&-]+", value) is not None


def _groups(devices: Iterable[DeviceSpec]) -> list[list[DeviceSpec]]:
    """Return devices with the same kernels together, the largest of each group first."""
    groups: dict[tuple[int, int], list[DeviceSpec]] = defaultdict(list)
    for device in devices:
        groups[device.capability].append(device)
    return [sorted(group, key=lambda one: -one.capacity_bytes) for group in groups.values()]


@dataclass(slots=True)
class _Shared:
    """Rehearses groups of devices.

    Attributes:
        found: Answers by the name of the device.
        rehearsals: How many processes were needed.
    """

    prepared: PreparedRehearsal
    found: dict[str, DeviceAnswer] = field(default_factory=dict[str, DeviceAnswer])
    rehearsals: int = 0

    def rehearse(self, group: Sequence[DeviceSpec]) -> None:
        """Find the answers of devices with the same kernels."""
        first, *rest = group
        others = tuple(rest)
        with self._told(group):
            recording = limited = self.prepared.run(device=first, others=others, loud=True)
        refusing: list[RehearsalAnswer] = []
        if lacks_needs(limited):
            self.rehearsals += 1
            recording = self.prepared.without_limit(first, others)
            refusing.append(limited)
        whole = joined(limited, recording) if recording is not limited else limited
        self._keep(whole, first.name)
        known = {one.device.name: one for one in recording.others}
        for device in rest:
            shared = known.get(device.name)
            if not limited.ran and not limited.killed_by:
                self._keep(limited.model_copy(update={"device": device}), first.name)
            elif shared is None:
                self._alone(device, recording.apart)
            elif not shared.out_of_memory:
                self._keep(shared, first.name)
            else:
                self._refused(shared, first, refusing)

    def _refused(self, shared: RehearsalAnswer, first: DeviceSpec, refusing: list[RehearsalAnswer]) -> None:
        """Find the answer of a device that refuses an allocation of the recording."""
        (error,) = shared.out_of_memory
        needs = shared.model_copy(update={"out_of_memory": ()})
        same = next((one for one in refusing if _ends_at(one, error)), None)
        if same is not None:
            self._keep(joined(_elsewhere(same, shared.device, error, needs), needs), same.device.name)
            return
        with self._told([shared.device]):
            limited = self.prepared.run(device=shared.device)
        refusing.append(limited)
        self._keep(joined(limited, needs) if lacks_needs(limited) else limited, shared.device.name)

    def _alone(self, device: DeviceSpec, why: str) -> None:
        with self._told([device]):
            limited = self.prepared.run(device=device)
        self.rehearsals += lacks_needs(limited)
        self._keep(with_needs(limited, self.prepared), device.name, why)

    def _keep(self, answer: RehearsalAnswer, recorded_on: str, why: str = "") -> None:
        whole = with_ladder(answer.model_copy(update={"others": (), "apart": ""}), self.prepared)
        self.found[whole.device.name] = DeviceAnswer(whole, recorded_on, why)

    def keep_seen(self, answer: RehearsalAnswer) -> None:
        """Keep what an interrupted rehearsal has seen, of the devices that share its recording too."""
        for one in (answer, *answer.others):
            if one.memory is not None and one.device.name not in self.found:
                alone = one.model_copy(update={"others": (), "apart": ""})
                self.found[one.device.name] = DeviceAnswer(alone, answer.device.name)

    @contextmanager
    def _told(self, devices: Sequence[DeviceSpec]) -> Generator[None, None, None]:
        names = ", ".join(one.name for one in devices)
        self.prepared.options.on_note(f"rehearsing for {names}")
        self.rehearsals += 1
        yield


def _ends_at(limited: RehearsalAnswer, error: OutOfMemory) -> bool:
    """Whether a rehearsal ended, uncaught, by an error at the same place, of code that can be told."""
    if limited.end is not ScriptEnd.OUT_OF_MEMORY or len(limited.out_of_memory) != 1 or not error.source:
        return False
    (own,) = limited.out_of_memory
    return (own.line, own.source, own.phase) == (error.line, error.source, error.phase)


def _elsewhere(
    limited: RehearsalAnswer, device: DeviceSpec, error: OutOfMemory, needs: RehearsalAnswer
) -> RehearsalAnswer:
    """Return the answer of a rehearsal that ran out of memory as that of another device, which does so there too."""
    (own,) = limited.out_of_memory
    return limited.model_copy(
        update={
            "device": device,
            "out_of_memory": (error,),
            "reasons": (error.message.partition(". GPU 0")[0],),
            "traceback": limited.traceback.replace(own.message, error.message),
            "confidence": needs.confidence,
        }
    )
