"""Checks of a study's devices, rows, batches and models: requests to children and the judgement of their answers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from dryfit.config.schema import StudyConfig
from dryfit.core.errors import ChildError, MachineError
from dryfit.core.jobs.diagnostics import BatchCheckRequest, BatchCheckResult, PointCheck, ProbeResult, StepCheck
from dryfit.core.jobs.train import ResolveResult, TrainRequest
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.execution import DeviceKind, plan_execution
from dryfit.core.settings.known_devices import TF32_CAPABILITY
from dryfit.core.settings.splits import TRAIN, VALIDATION
from dryfit.core.settings.tables import ModelSettings, TrialSettings
from dryfit.core.settings.trial import Scalar
from dryfit.core.sharding.device_groups import check_enough
from dryfit.core.text.words import few
from dryfit.search.space.fields import setting
from dryfit.search.space.space import Space
from dryfit.study.doctor.finding import Finding, failed, failed_by, passed, warned
from dryfit.study.doctor.study_checks import Drawn
from dryfit.study.trials.trial_config import config_of

DATA: Final = "data"

_COVERED: Final = (
    "loss.",
    "head.",
    "span.",
    "multitask.",
    "joint.",
    "optim.name",
    "sched.name",
    "train.precision",
    "regularization.freeze_layers",
)
"""Keys of which every value is tried: they choose code or shapes; others only choose numbers."""

_MOST_POINTS: Final = 8


@dataclass(frozen=True, slots=True)
class CheckScope:
    """What all batch checks of a study share.

    Attributes:
        fingerprint: Fingerprint of the rows.
        device: The device that trials would run on.
        visible_device: The CUDA device to use, or several; None on the CPU.
        parallel: Most trials side by side.
        cache_dir: The cache of tokenised rows.
        scratch: A folder for files that are not needed.
    """

    config: StudyConfig
    space: Space
    fingerprint: str
    device: DeviceKind
    visible_device: str | None
    cores: int
    parallel: int
    cache_dir: Path
    scratch: Path


def device_findings(config: StudyConfig, precisions: Sequence[str], probe: ProbeResult) -> Iterator[Finding]:
    """Check that the requested device and number formats of a study are available."""
    wish, there = config.execution.device, bool(probe.devices)
    if wish == "cuda" and not there:
        found = f'execution.device = "cuda", and torch {probe.torch} can use no CUDA device'
        yield failed("study", "device", found, 'set execution.device = "auto" to train on the CPU')
        return
    device = device_of(config, probe)
    on_cuda = [wanted for wanted in (Precision.FP16, Precision.TF32) if wanted in precisions]
    if device is DeviceKind.CPU and on_cuda:
        found = f"{' and '.join(on_cuda)} needs a CUDA device"
        yield failed("study", "precision", found, 'train.precision = "fp32" or "bf16" on the CPU')
    elif Precision.TF32 in precisions and (old := [one for one in probe.devices if one.capability < TF32_CAPABILITY]):
        yield failed("study", "precision", f"{old[0].name} has no tf32", 'train.precision = "fp32" or "fp16"')
    elif device is DeviceKind.CUDA and Precision.BF16 in precisions and not probe.bf16:
        yield failed("study", "precision", f"{probe.devices[0].name} has no bf16", 'train.precision = "fp32" or "fp16"')
    else:
        yield passed("study", "device", f"{device}, {', '.join(precisions)}")
    if config.execution.processes > 1:
        yield _process_devices(config.execution.processes, device, len(probe.devices))


def _process_devices(processes: int, device: DeviceKind, count: int) -> Finding:
    """Check that trials of several processes have the devices that they take."""
    wanted = f"{processes} processes of each trial (execution.tp, execution.dp)"
    if device is DeviceKind.CPU:
        return passed("study", "processes", f"{wanted} share the cores")
    try:
        check_enough(count, processes)
    except MachineError as error:
        return failed_by("study", "processes", error)
    groups, idle = divmod(count, processes)
    found = f"{wanted} have a device each: {groups} such trial(s) on {count} device(s) without sharing any"
    if idle:
        fix = f"nothing, or take a number of which {count} is a multiple"
        return warned("study", "processes", f"{found}; {idle} device(s) stay idle", fix)
    return passed("study", "processes", found)


def device_of(config: StudyConfig, probe: ProbeResult) -> DeviceKind:
    """Return the device that the study's trials would run on."""
    return DeviceKind.CUDA if config.execution.device != "cpu" and probe.devices else DeviceKind.CPU


def data_findings(resolved: ResolveResult, num_labels: int) -> Iterator[Finding]:
    """Describe the splits, every row of which was read, and warn of labels or evidence that they lack."""
    splits, name_of = resolved.splits, resolved.class_name
    labelled = any(facts.label_counts for facts in splits.values())
    for name, facts in splits.items():
        found, missing = [f"{facts.rows} rows"], list[str]()
        if labelled:
            found.append(
                "by label " + ", ".join(f"{name_of(label)}: {count}" for label, count in facts.label_counts.items())
            )
            missing += [f"of label {name_of(label)}" for label in range(num_labels) if label not in facts.label_counts]
        if facts.with_evidence is not None:
            found.append(f"{facts.with_evidence} with evidence")
            missing += [] if facts.with_evidence else ["with evidence"]
        if missing:
            fix = f"add rows {few(missing)}: scores of this split say nothing of it"
            yield warned(DATA, name, "; ".join(found), fix)
        else:
            yield passed(DATA, name, "; ".join(found))


def fold_findings(fold_rows: Sequence[int]) -> Iterator[Finding]:
    """Describe the folds of a study, if it has some."""
    if fold_rows:
        found = f"{len(fold_rows)}, of {min(fold_rows)} to {max(fold_rows)} of {sum(fold_rows)} rows"
        yield passed(DATA, "folds", found)


def batch_checks(scope: CheckScope, drawn: Drawn) -> dict[str, BatchCheckRequest]:
    """Return one request for each distinct model, by its name."""
    base = scope.space.as_prepared(scope.config.trial_settings)
    lengths: dict[ModelSettings, list[int]] = {}
    for model, length in scope.space.model_length_pairs(base):
        lengths.setdefault(model, []).append(length)
    return {_name(model): _batch_check(scope, model, tuple(sorted(set(own))), drawn) for model, own in lengths.items()}


def _name(model: ModelSettings) -> str:
    return f"{model.name}@{model.revision}" if model.revision is not None else model.name


def _batch_check(scope: CheckScope, model: ModelSettings, lengths: tuple[int, ...], drawn: Drawn) -> BatchCheckRequest:
    base = scope.space.as_prepared(scope.config.trial_settings)
    batch_size = int(max(base.train.batch_size, scope.space.most("train.batch_size", 0)))
    evals = int(max(base.train.evals_per_epoch, scope.space.most("train.evals_per_epoch", 0)))
    update = {"batch_size": batch_size, "max_length": lengths[-1], "evals_per_epoch": evals}
    train = base.train.model_copy(update=update)
    settings = base.model_copy(update={"model": model, "train": train})
    plan = plan_execution(
        scope.config.execution,
        effective_batch=batch_size,
        device=scope.device,
        cores=scope.cores,
        parallel=scope.parallel,
    )
    trial_of = partial(config_of, scope.config, data_fingerprint=scope.fingerprint)
    params = {name: setting(settings, name) for name in scope.space.names}
    config = trial_of(settings, params)
    trial = TrainRequest.apart(
        config, plan, cache_dir=scope.cache_dir, folder=scope.scratch, visible_device=scope.visible_device
    )
    points = covering(tuple((params, one) for params, one in drawn if one.model == model))
    configs = tuple(trial_of(one, params, number=at) for at, (params, one) in enumerate(points, 1))
    return BatchCheckRequest(trial=trial, lengths=lengths, points=configs)


def covering(drawn: Drawn) -> Drawn:
    """Choose a few points that together have each value of every key that chooses code, as far as a few can.

    Greedy: the point with the most new values, the first of equals, until none has any.
    """
    left = list(drawn)
    chosen: list[tuple[dict[str, Scalar], TrialSettings]] = []
    seen: set[tuple[str, str]] = set()
    while left and len(chosen) < _MOST_POINTS:
        best = max(left, key=lambda one: len(_choices(one[0]) - seen))
        fresh = _choices(best[0]) - seen
        if not fresh:
            break
        seen |= fresh
        chosen.append(best)
        left.remove(best)
    return tuple(chosen)


def _choices(params: dict[str, Scalar]) -> set[tuple[str, str]]:
    return {
        (name, repr(value))
        for name, value in params.items()
        if name.startswith(_COVERED) and not isinstance(value, float)
    }


def model_findings(
    name: str, asked: BatchCheckRequest, checked: BatchCheckResult | ChildError, train_rows: int
) -> Iterator[Finding]:
    """Judge the answer of a batch check.

    Args:
        name: The model's name.
        asked: The request.
        checked: The answer; an error if the process ended without one.
        train_rows: Rows of the training split; if they were cut into windows, the answer has their number.
    """
    about = f"model {name}"
    if isinstance(checked, ChildError):
        yield failed(about, "rehearsal", checked.found, checked.hint or "read the log")
        return
    yield from (failed_by(about, one.stage, one.error) for one in checked.failures)
    yield from _batches(about, checked)
    yield from _validations(about, asked, checked)
    for remark in checked.remarks:
        yield warned(about, "rows", remark, "raise the limit that it names, or leave these rows as they are")
    if checked.step is not None:
        yield _gradients(about, checked.step)
        yield from _time(about, asked, checked.step, _epoch_rows(checked, asked.trial.config.data.folds, train_rows))
    yield from _points(about, checked.points)


def _epoch_rows(checked: BatchCheckResult, folds: int, train_rows: int) -> int:
    """Return the rows, or windows, that one epoch trains on; over all folds, each of which leaves its own out."""

    def most(split: str, otherwise: int) -> int:
        return max((walk.rows for walk in checked.walks if walk.split == split), default=otherwise)

    train = most(TRAIN, train_rows)
    return train if folds == 1 else (train + most(VALIDATION, 0)) * (folds - 1)


def _batches(about: str, checked: BatchCheckResult) -> Iterator[Finding]:
    fix = "take a tokenizer that belongs to the model, a smaller train.max_length, or more data.num_labels"
    faults = [f"{walk.split} at {walk.max_length}: {fault}" for walk in checked.walks for fault in walk.faults]
    if faults:
        yield failed(about, "batches", few(faults, most=3), fix)
    elif checked.walks:
        batches = sum(walk.batches for walk in checked.walks)
        longest = max(walk.longest for walk in checked.walks)
        lengths = sorted({walk.max_length for walk in checked.walks})
        said = f"{batches} made and checked at train.max_length {few(map(str, lengths))}; longest row {longest} tokens"
        yield passed(about, "batches", said)


def _validations(about: str, asked: BatchCheckRequest, checked: BatchCheckResult) -> Iterator[Finding]:
    """Check that an epoch of the largest batches has a step for each of its validations."""
    steps = min((walk.batches for walk in checked.walks if walk.split == TRAIN), default=None)
    train = asked.trial.config.settings.train
    if steps is not None and train.evals_per_epoch > steps:
        found = f"train.evals_per_epoch = {train.evals_per_epoch}, and with train.batch_size = {train.batch_size} an "
        found += f"epoch has {steps} step(s): such a trial fails"
        yield failed(about, "validations", found, f"train.evals_per_epoch = {steps}, or a smaller train.batch_size")


def _gradients(about: str, step: StepCheck) -> Finding:
    what = f"{step.rows} rows of {step.length} tokens: loss {step.loss:.4g}"
    broken = 'look for NaN in the weights (another copy, another revision), or take train.precision = "fp32"'
    if not math.isfinite(step.loss):
        return failed(about, "step", what, broken)
    if step.not_finite:
        found = f"{what}; {len(step.not_finite)} gradients are infinite or NaN: {few(step.not_finite, most=3)}"
        return failed(about, "step", found, broken)
    of_head = [one for one in step.untouched if one.startswith(("head.", "fusion."))]
    untouched = f"{what}; {len(step.untouched)} parameters got no gradient: {few(step.untouched, most=3)}"
    if of_head:
        return failed(about, "step", untouched, "another head.pooling or head.activation: this head learns nothing")
    if step.untouched:
        fix = "nothing, if the model has parts that its task does not use; they stay as they are"
        return warned(about, "step", untouched, fix)
    trained = f"{step.trainable:,} of {step.parameters:,} parameters have finite gradients, none of them zero"
    return passed(about, "step", f"{what}; {trained}")


def _time(about: str, asked: BatchCheckRequest, step: StepCheck, epoch_rows: int) -> Iterator[Finding]:
    if step.micro_batch < asked.trial.plan.micro_batch:
        found = f"{step.rows} rows at once do not fit the device: {step.micro_batch} do"
        yield warned(about, "memory", found, "nothing: the planner splits batches; `dryfit plan` says what fits")
    if step.step_s is None:
        return
    epochs = asked.trial.config.settings.train.epochs
    passes = f"{epoch_rows * epochs} rows"
    trial_s = step.step_s / step.rows * epoch_rows * epochs
    found = f"{step.largest_s * 1000:.0f} ms forward and backward of the largest batch, {step.step_s * 1000:.0f} ms of "
    found += f"a middling one; about {_duration(trial_s)} a trial ({passes}), optimizer and validation left out"
    yield passed(about, "time", found)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _points(about: str, points: Sequence[PointCheck]) -> Iterator[Finding]:
    """Judge small steps of trials that the space can draw; those that fail are named with their values."""
    good = 0
    for point in points:
        values = ", ".join(f"{name}={value}" for name, value in point.params.items() if name.startswith(_COVERED))
        if point.error is not None:
            yield failed_by(about, f"point {values}", point.error)
        elif point.step is not None and not (math.isfinite(point.step.loss) and not point.step.not_finite):
            fix = "leave this value out of the space, or give it a `when`"
            yield failed(about, f"point {values}", f"loss {point.step.loss:.4g}, gradients not finite", fix)
        else:
            good += 1
    if good:
        yield passed(about, "points", f"{good} further trials of the space did a small step, {len(points) - good} not")
