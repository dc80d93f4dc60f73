"""Plan the memory of trials without a device, and calibrate a device."""

import os
from collections.abc import Sequence
from pathlib import Path

from dryfit.ledger.folder import shared_traces
from dryfit.processes.node import device_of, gpu_count, named_gpu, visible_here
from dryfit.settings.choices import BuiltInTask, Precision
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import ExecutionSettings
from dryfit.settings.plan_messages import CalibrateResult, PlanAnswer
from dryfit.settings.run_costs import Prices
from dryfit.settings.sharding import AUTO, DEGREES, degrees_within
from dryfit.settings.study_file_checks import Use
from dryfit.settings.study_file_reading import load_study_file, load_study_text
from dryfit.settings.text import parse_bytes
from dryfit.study.arguments import layout_of, space_of, study_file_of
from dryfit.study.pace import with_precision
from dryfit.study.plan_requests import OnNote, PlanInput, SpacePlan, measure_and_compare, plan_combinations, plan_trial
from dryfit.study.template import preset_text


def plan(
    study_file: Path | str | None = None,
    *,
    device: str | None = None,
    overrides: Sequence[str] = (),
    preset: str | None = None,
    task: BuiltInTask | None = None,
    ladder: bool = False,
    on_note: OnNote = lambda _: None,
) -> PlanAnswer:
    """Say whether a trial with the study's own values fits a device, without using one.

    Args:
        study_file: A study file or its folder; None: the defaults, or ``preset``. Its data may be missing.
        device: ``rtx4090``, ``a100-80``, ``24GiB``, ...; None: this machine's first GPU.
        overrides: ``key=value`` pairs that replace keys of the file; ``execution.*`` keys are kept as given.
        preset: A study file that comes with dryfit.
        task: That of the preset, where it is for several.
        ladder: Price every change, also where none is needed; slower.
        on_note: Called with a line about what is being done.

    Raises:
        ConfigError: A key, a size or the device is wrong, or there is no GPU and none was named.
        DryfitError: The data or the model is wrong.
    """
    asked = plan_input(study_file, device=device, overrides=overrides, preset=preset, task=task)
    return plan_trial(asked, on_note, ladder=ladder)


def plan_space(
    study_file: Path | str | None = None,
    *,
    device: str | None = None,
    overrides: Sequence[str] = (),
    preset: str | None = None,
    task: BuiltInTask | None = None,
    on_note: OnNote = lambda _: None,
) -> SpacePlan:
    """Say which part of a study's search space fits a device. The arguments are as in :func:`plan`.

    Raises:
        ConfigError: As :func:`plan`; or there are too many combinations.
        DryfitError: The data or a model is wrong.
    """
    return plan_combinations(
        plan_input(study_file, device=device, overrides=overrides, preset=preset, task=task), on_note
    )


def plan_input(
    study_file: Path | str | None,
    *,
    device: str | None,
    overrides: Sequence[str],
    preset: str | None,
    task: BuiltInTask | None = None,
    prices: Prices | None = None,
) -> PlanInput:
    """Read and check the subject of a plan; nothing is started.

    Raises:
        ConfigError: As :func:`plan`.
    """
    if study_file is not None and preset is not None:
        raise ConfigError("planning", f"a study file ({study_file}) and a preset ({preset})", "one of them")
    if task is not None and preset is None:
        raise ConfigError("planning", f"a task ({task}) without a preset", "--preset beside it, or study.task")
    layout = None
    if study_file is not None:
        loaded = load_study_file(study_file_of(Path(study_file)), overrides, Use.PLAN)
        layout = layout_of(study_file)
    elif preset is not None:
        loaded = load_study_text(preset_text(preset, task), Path(f"preset {preset}"), overrides, Use.PLAN)
    else:
        loaded = load_study_text("", Path("the defaults"), overrides, Use.PLAN)
    spec = device_of(device)
    limit = loaded.config.execution.memory_limit
    if limit is not None:
        spec = spec.model_copy(update={"capacity_bytes": min(spec.capacity_bytes, parse_bytes(limit))})
    degrees = _degrees(loaded.config.execution, named=device is not None)
    config = with_precision(loaded.config, Precision.FP32)  # auto may take bf16, which needs no more
    traces = shared_traces(os.environ, Path.home())
    return PlanInput(config, space_of(loaded), spec, traces, layout, degrees, prices=prices)


def _degrees(execution: ExecutionSettings, *, named: bool) -> tuple[int, ...]:
    """Return the numbers of ranks that a trial may take; any number of a device that is only named."""
    if execution.tp != AUTO:
        return ()
    return DEGREES if named else degrees_within(gpu_count(visible_here()))


def calibrate(device: str = "cuda:0", *, quick: bool = False, on_note: OnNote = lambda _: None) -> CalibrateResult:
    """Measure a handful of training steps on a GPU and keep what later plans for its kind of device can use.

    Args:
        device: ``cuda`` or ``cuda:N``, counted among those that this process may use.
        quick: Fewer steps.
        on_note: Called with a line about what is being done.

    Raises:
        ConfigError: It is no such name.
        MachineError: There is no such device.
        ChildError: Nothing could be measured.
    """
    visible = named_gpu(device, visible_here())
    keep_in = shared_traces(os.environ, Path.home()).parent
    return measure_and_compare(visible, keep_in, on_note, quick=quick)
