"""Checks of a study before anything runs: file, folder, ledger, devices, rows, batches, models."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dryfit.ledger.events import Compatibility, GenerationBegan, StudyRevised
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import each_event, lock_owner
from dryfit.ledger.replay import StudyState
from dryfit.search.changes import comparability_key
from dryfit.search.followers import demand_tracker, server_trouble, silence, storage_url
from dryfit.search.samplers import suggest
from dryfit.search.space import Space, apply_params, setting
from dryfit.settings.check_messages import BatchCheckRequest, BatchCheckResult, PointCheck, ProbeResult, StepCheck
from dryfit.settings.choices import Precision
from dryfit.settings.devices import TF32_CAPABILITY, check_enough
from dryfit.settings.errors import ChildError, ConfigError, LedgerError, MachineError
from dryfit.settings.execution import plan_execution
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.sharding import AUTO
from dryfit.settings.splits import TRAIN, VALIDATION
from dryfit.settings.study_file import SamplerName, StudyConfig
from dryfit.settings.study_file_checks import tracker_of
from dryfit.settings.tables import ModelSettings, TrialSettings
from dryfit.settings.text import few, gib
from dryfit.settings.training_messages import ResolveResult, TrainRequest
from dryfit.settings.trial import Scalar
from dryfit.study.context import config_of
from dryfit.study.files import DiskNeed, what_fits
from dryfit.study.generations import next_generation, recorded
from dryfit.study.machine_checks import Finding, FolderFacts, failed, failed_by, look_at_folder, passed, warned
from dryfit.study.pace import recorded_precision, with_precision

ABOUT: Final = "study"

_DRAWS: Final = 64
_PORTS: Final = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306, "redis": 6379}
_ROOMY: Final = 2.0
"""Free disk below this many times the need gives a warning: other programs write too."""

_NO_LONGER: Final = "values so far do not compare with new ones, and a new generation would begin"

Drawn = tuple[tuple[dict[str, Scalar], TrialSettings], ...]
"""Points of a space, with the settings that they give."""


def space_findings(config: StudyConfig, space: Space) -> tuple[Finding, Drawn]:
    """Draw points of the space at random, and check that they give legal settings."""
    drawn: list[tuple[dict[str, Scalar], TrialSettings]] = []
    search = config.search.model_copy(update={"sampler": SamplerName.RANDOM})
    for number in range(_DRAWS if space.params else 0):
        point = suggest(
            space,
            (),
            search=search,
            directions=(config.study.resolved_direction,),
            points=(),
            seed=config.study.seed,
            number=number,
        )
        if config.function is not None:  # its names are its own: there are no settings to put the values into
            drawn.append((point.params, config.trial_settings))
            continue
        try:
            drawn.append((point.params, apply_params(config.trial_settings, point.params)))
        except ConfigError as error:
            return failed_by(ABOUT, "space", error), tuple(drawn)
    return passed(ABOUT, "space", _space_text(space, len(drawn))), tuple(drawn)


def _space_text(space: Space, drawn: int) -> str:
    if not space.params:
        return "nothing is searched: every trial has the study's own values"
    conditions = sum(1 for param in space.params if param.when)
    legal = f"{drawn} points drawn at random give legal settings"
    return f"{len(space.names)} keys, {conditions} cases with a condition; {legal}"


def lock_finding(layout: StudyLayout) -> Finding:
    """Check that no process runs the study now."""
    try:
        owner = lock_owner(layout.lock)
    except OSError as error:
        return failed(ABOUT, "lock", f"{layout.lock}: {error.strerror}", "make the study's files yours (chown, chmod)")
    if owner is not None:
        fix = f"wait for it, or stop it with `dryfit stop {layout.folder}`"
        return failed(ABOUT, "lock", f"process {owner} is running it", fix)
    return passed(ABOUT, "lock", "nobody runs it")


def record_findings(config: StudyConfig, space: Space, layout: StudyLayout) -> tuple[list[Finding], StudyState]:
    """Check the ledger, and the effect of this file on its study."""
    state, events = StudyState(), 0
    try:
        for event in each_event(layout.ledger):
            state.apply(event)
            events += 1
    except LedgerError as error:
        return [failed_by(ABOUT, "ledger", error)], StudyState()
    except OSError as error:
        fix = "make the study's files readable for you"
        return [failed(ABOUT, "ledger", f"{layout.ledger}: {error.strerror}", fix)], StudyState()
    if state.created is None or not state.trials:
        return [passed(ABOUT, "ledger", "no trial yet: `dryfit tune` begins the study")], StudyState()
    ended = sum(1 for trial in state.trials if trial.outcome is not None)
    found = passed(ABOUT, "ledger", f"{events} events, {len(state.trials)} trials, {ended} of them ended")
    return [found, *_going_on(config, space, layout, state)], state


_FORKS_FIX: Final = "nothing, if that is meant: all trials are kept, and the total counts from zero; or change it back"


def _going_on(config: StudyConfig, space: Space, layout: StudyLayout, state: StudyState) -> Iterator[Finding]:
    missing = recorded(state, layout)
    if missing is not None:
        state.apply(missing)
    config = with_precision(config, recorded_precision(state))
    now = comparability_key(config, space, data=state.generation.comparability.data, folder=layout.folder)
    following = next_generation(state, now)
    match following:
        case GenerationBegan(generation=number, reasons=reasons, reused=reused) if number > 1:
            kept = f"generation {number} would begin, {len(reused)} of {len(state.trials)} trials would be used"
            yield warned(ABOUT, "going on", f"{Compatibility.FORKS}: {'; '.join(reasons)}: {kept}", _FORKS_FIX)
        case StudyRevised(compatibility=compatibility, reasons=reasons) if reasons:
            found = f"{compatibility}: {'; '.join(reasons)}: its trials count as before"
            yield passed(ABOUT, "going on", found)
        case _:
            yield passed(ABOUT, "going on", "the file fits the study in the folder")


def repeat_findings(config: StudyConfig) -> Iterator[Finding]:
    """Report why a study is not repeatable: measured or random settings; nothing for a repeatable one."""
    found: list[str] = []
    if config.runtime.parallel == AUTO:
        found.append('runtime.parallel = "auto": another run need not have the same trials; with 1 it has')
    if config.train.precision is Precision.AUTO:
        found.append('train.precision = "auto": fp32 or bf16, measured before the first trial, then kept')
    if found:
        yield passed(ABOUT, "repeat", "; ".join(found))


def mirror_finding(target: str, layout: StudyLayout, environment: Mapping[str, str]) -> Finding:
    """Check whether the Optuna mirror can be written; only its missing variable refuses the study.

    Args:
        target: ``search.mirror``; a URL may hold a password, and is not printed.
        layout: The study's folder.
        environment: Has the URL that ``env:NAME`` stands for.
    """
    if target == "none":
        return passed(ABOUT, "mirror", "off")
    if target == "journal":
        return passed(ABOUT, "mirror", str(layout.journal))
    try:
        url = storage_url(target, environment)
    except MachineError as error:
        return failed_by(ABOUT, "mirror", error)
    kind, trouble = _url_trouble(url)
    if trouble:
        return warned(ABOUT, "mirror", f"{kind}: {trouble}", 'start the server, or set search.mirror = "journal"')
    return passed(ABOUT, "mirror", f"{kind}: somebody answers")


def tracker_finding(entry: str, layout: StudyLayout, environment: Mapping[str, str]) -> Finding:
    """Check whether a tracker can be written: a study is refused without its package or its variable.

    Args:
        entry: One of ``study.track``.
        layout: The study's folder.
        environment: Has the URL that ``env:NAME`` stands for.
    """
    tracker, about = tracker_of(entry), f"track {entry}"
    try:
        where = demand_tracker(tracker, layout.folder, environment)
    except MachineError as error:
        return failed_by(ABOUT, about, error)
    trouble = server_trouble(tracker, where, environment)
    if trouble:
        return warned(ABOUT, about, trouble, "a study runs without it: what is missing is written once it is there")
    return passed(ABOUT, about, "can be written")


def _url_trouble(url: str) -> tuple[str, str]:
    """The kind of a storage URL, and why it cannot be reached; nothing is written there."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "search.mirror", "it is no URL"
    kind = parts.scheme.partition("+")[0]
    if kind == "sqlite":
        facts = look_at_folder(Path(parts.path.removeprefix("/") or ".").parent)
        return "sqlite", facts.not_writable and f"{facts.folder}: {facts.not_writable}"
    if kind not in _PORTS:
        return kind or "search.mirror", "it is no storage that Optuna knows"
    return f"{kind} on {host or 'localhost'}", silence(host, port or _PORTS[kind])


def cache_finding(layout: StudyLayout, folder: FolderFacts) -> Finding:
    """Describe the token cache."""
    if not layout.cache.is_dir():
        return passed(ABOUT, "token cache", "none yet: it is made from the rows")
    folders = [entry for entry in layout.cache.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    sets = [entry for entry in folders if any(entry.glob("*.safetensors"))]  # others hold what models compute
    size_bytes = sum(file.stat().st_size for entry in sets for file in entry.iterdir() if file.is_file())
    found = f"{len(sets)} of (data, model, length), {gib(size_bytes)}"
    if folder.not_writable:
        return warned(ABOUT, "token cache", f"{found}, and no more can be added", "make the study's folder writable")
    return passed(ABOUT, "token cache", found)


def disk_finding(need: DiskNeed, folder: FolderFacts, taken_bytes: int) -> Finding:
    """Check whether the disk has room for the study's files.

    Args:
        need: What they take at most.
        folder: Their folder.
        taken_bytes: What they take already; a part of the need.
    """
    usable_bytes = folder.free_bytes + taken_bytes
    parts = f"{gib(need.running_bytes)} while trials run, {gib(need.kept_bytes)} weights kept"
    found = f"up to {gib(need.total_bytes)} needed ({parts}), {gib(folder.free_bytes)} free in {folder.folder}"
    if need.total_bytes > usable_bytes:
        fits = what_fits(need, usable_bytes)
        return failed(ABOUT, "disk", found, f"{fits}, or free some space" if fits else "free some space, or use --dir")
    if _ROOMY * need.total_bytes > usable_bytes:
        return warned(ABOUT, "disk", found, "free some space: a full disk pauses a study")
    return passed(ABOUT, "disk", found)


def data_changed(state: StudyState, fingerprint: str) -> Finding | None:
    """Return a warning if the rows are no longer those of the trials so far; else None."""
    before = state.resolved
    if before is None or not state.trials or before.data_fingerprint == fingerprint:
        return None
    found = f"the rows have changed: fingerprint {fingerprint}, it was {before.data_fingerprint}; {_NO_LONGER}"
    return warned("data", "rows", found, _FORKS_FIX)


# Checks of a study's devices, rows, batches and models: requests to children and the judgement of their answers.


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
