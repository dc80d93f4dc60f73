"""Learn from one measured step what a GPU reaches, so that later step times for it are surer."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

from dryfit.processes.node import device_of, power_limit_watts
from dryfit.processes.rehearsal_process import user_python
from dryfit.processes.wall import claimed_folder
from dryfit.settings.device_reach import device_reach
from dryfit.settings.devices import known_name, parse_device
from dryfit.settings.errors import ChildError, ConfigError
from dryfit.settings.reach_calibrations import Quantity, ReachCalibration, keep_reach
from dryfit.settings.version import PACKAGE_FOLDER
from dryfit.study.rehearsals import RehearsalOptions, prepare, read_command

TIMED_STEPS: Final = 30
_DOING: Final = "calibrating step times"
_RATE: Final = "train_steps_per_second"
_MOST_RESULTS_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class StepCalibrated:
    """What a measured step says of a device.

    Attributes:
        kept: As later rehearsals use it.
        before: The share that they used until now; None: none was known.
        estimated_s: What the step was estimated to take until now; None: it was not.
    """

    kept: ReachCalibration
    before: float | None
    estimated_s: float | None


@dataclass(frozen=True, slots=True)
class _Measured:
    seconds: float
    torch: str = ""
    watts: int | None = None


def calibrate_steps(words: Sequence[str], measured: str | None, options: RehearsalOptions) -> StepCalibrated:
    """Find and keep what a device reaches, by the script's own step on it.

    Args:
        words: The command line of a training script.
        measured: Seconds of its step on the device, or a file of transformers' results (``train_results.json``,
            ``all_results.json``, ``trainer_state.json``); None: the script runs on this machine's first GPU.
        options: ``device`` names the device; None: this machine's first GPU.

    Raises:
        ConfigError: The device is not known or another one than ran, or nothing explains the seconds.
        ChildError: The script did not make enough steps.
    """
    spec = device_of(options.device if measured is not None else None)
    name = known_name(spec)
    if device_reach(name) is None:
        raise ConfigError(_DOING, f"{spec.name} has no published rates", "a GPU that is known by its name")
    if measured is None and options.device is not None and known_name(parse_device(options.device)) != name:
        raise ConfigError(_DOING, f"this machine has {name}", f"a run on {options.device}, or its --measured seconds")
    found = _measure(words, options) if measured is None else _Measured(_given(measured))
    command = read_command(words)
    prepared = prepare(command, replace(options, device=name))
    options.on_note(f"rehearsing the script on {name}, of which a step took {found.seconds:.3g} s")
    answer = prepared.run(unlimited=True, measured_step_s=found.seconds)
    fitted = answer.fitted
    if fitted is None or fitted.value is None:
        why = fitted.why if fitted is not None else "; ".join(answer.reasons) or "the rehearsed step has no time"
        raise ConfigError(_DOING, f"{found.seconds:.3g} s a step on {name}: {why}", "a step that the GPU decides")
    kept = ReachCalibration(
        device=name,
        quantity=cast("Quantity", fitted.quantity),
        value=fitted.value,
        measured_s=found.seconds,
        torch=found.torch or answer.torch,
        watts=found.watts,
        day=datetime.now(UTC).date().isoformat(),
        command=" ".join(words),
    )
    assert prepared.request.calibration_dir is not None
    keep_reach(Path(prepared.request.calibration_dir), kept)
    time = answer.work.step_time if answer.work is not None else None
    return StepCalibrated(kept, fitted.before, time.estimate_s if time is not None else None)


def _given(text: str) -> float:
    """Return seconds that the user gave, or those of a file of results.

    Raises:
        ConfigError: They are neither.
    """
    allowed = f"seconds, such as 0.363, or a JSON file with {_RATE}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = _of_results(Path(text), allowed)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{_DOING}: --measured", f"{text!r}", allowed)
    return seconds


def _of_results(path: Path, allowed: str) -> float:
    try:
        with path.open("rb") as file:
            read = json.loads(file.read(_MOST_RESULTS_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_DOING}: --measured", f"{path}: {error}", allowed) from error
    results = cast("dict[str, Any]", read if isinstance(read, dict) else {})
    entries = [results, *cast("list[dict[str, Any]]", results.get("log_history", []))]
    rate = next((one[_RATE] for one in reversed(entries) if _RATE in one), None)
    if not isinstance(rate, int | float) or rate <= 0:
        raise ConfigError(f"{_DOING}: --measured", f"{path} has no {_RATE}", allowed)
    return 1 / rate


def _measure(words: Sequence[str], options: RehearsalOptions) -> _Measured:
    """Run a script for some steps on this machine's first GPU.

    Raises:
        ChildError: It made too few.
    """
    command = read_command(words)
    if command.ranks not in (None, 1):
        raise ConfigError(_DOING, f"{command.ranks} ranks", "one: no step time is told of several")
    environment = options.surroundings.environment
    python, _ = user_python(None if options.python is None else Path(options.python), environment)
    target = ["-m", str(command.module)] if command.module else [str(command.script)]
    options.on_note(f"running the script for {TIMED_STEPS} steps on this machine's GPU: what it writes stays")
    with claimed_folder() as place:
        answer = place / "steps.json"
        file = PACKAGE_FOLDER / "gpu" / "timed_run.py"
        interpreter = str(python.path) if python is not None else sys.executable
        run = [interpreter, str(file), str(answer), str(TIMED_STEPS), *target, *command.arguments]
        status = subprocess.run(run, env={**environment, **command.environment}, check=False, stdout=sys.stderr)
        told = cast("dict[str, Any]", json.loads(answer.read_text("utf-8"))) if answer.is_file() else {}
    if not told.get("device") or not told.get("step_s"):
        what = f"{told.get('steps', 0)} steps on {told.get('device') or 'no GPU'}, status {status.returncode}"
        raise ChildError(_DOING, f"{what} {told.get('error', '')}".strip(), "two steps of an optimizer on a GPU")
    return _Measured(told["step_s"], told["torch"], power_limit_watts())
