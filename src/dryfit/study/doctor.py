"""``dryfit doctor``: runs its checks in order, in children where they need one."""

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dryfit.documents.plans import hours_lines
from dryfit.ledger.folder import StudyLayout, shared_traces
from dryfit.processes.child_spec import SupervisorSettings
from dryfit.processes.node import LocalNode, NodeFacts
from dryfit.processes.supervisor import Supervisor
from dryfit.search.space import Space
from dryfit.settings.check_messages import BatchCheckRequest, BatchCheckResult, ProbeResult
from dryfit.settings.choices import Precision
from dryfit.settings.devices import visible_devices
from dryfit.settings.errors import ChildError, DryfitError
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, VerdictKind, smallest_device
from dryfit.settings.plan_messages import NO_TORCH, NOTHING_TAKEN, PlanAnswer, RehearsedPlanRequest
from dryfit.settings.rehearsal_messages import FAILED_BY_ITSELF, NO_STEP_TAKEN, Interval, times
from dryfit.settings.run_costs import Prices, cost_of
from dryfit.settings.study_file import Isolation, StudyConfig
from dryfit.settings.tables import CalledCode
from dryfit.settings.task_facts import facts_of
from dryfit.settings.text import few, gib
from dryfit.settings.training_messages import ImportRequest, ResolveResult
from dryfit.settings.trial import Scalar
from dryfit.study import study_checks
from dryfit.study.child_jobs import STANDALONE_LIMITS, ChildJob, run_job, run_side_by_side
from dryfit.study.context import choose_place, degrees_at_hand, most_on_node, possible_values
from dryfit.study.files import disk_need, taken_bytes
from dryfit.study.machine_checks import (
    Finding,
    FolderFacts,
    RoundTrip,
    Status,
    failed,
    failed_by,
    folder_findings,
    fork_round_trip,
    forks_here,
    fresh_round_trip,
    look_at_folder,
    machine_facts,
    machine_findings,
    passed,
    warned,
)
from dryfit.study.pace import recorded_precision, with_precision
from dryfit.study.planning import PlanInput, plan_trial
from dryfit.study.requests import calling_request, resolve_request, with_names
from dryfit.study.study_checks import (
    DATA,
    CheckScope,
    batch_checks,
    data_findings,
    device_findings,
    device_of,
    fold_findings,
    model_findings,
)
from dryfit.study.trial_plans import host_bytes_for, needed_bytes, planning_device, refusal_text

# A supervisor for the doctor's children that has proved that it can start them.


@dataclass(frozen=True, slots=True)
class CheckRunner:
    """Runs the doctor's children, outside the study's folder.

    Attributes:
        node: This machine, which runs them.
        folder: Their folder.
        trips: The trial starts.
    """

    node: LocalNode
    folder: Path
    trips: tuple[RoundTrip, ...]

    @property
    def probe(self) -> ProbeResult | None:
        """What torch can use, as the first child reported."""
        return next((trip.probe for trip in self.trips if trip.probe is not None), None)


@contextmanager
def open_check_runner(folder: Path, isolation: Isolation, *, fresh: bool) -> Generator[CheckRunner, None, None]:
    """Test how children can start, and yield a runner that starts them so.

    Args:
        folder: The children's folder.
        isolation: As in ``runtime.isolation``.
        fresh: Whether a fresh interpreter is tried as well if forks work.
    """
    trips: tuple[RoundTrip, ...] = ()
    if forks_here() and isolation is not Isolation.FRESH:
        with Supervisor(SupervisorSettings.of_no_study(folder, Isolation.FORKSERVER)) as supervisor:
            node = LocalNode(supervisor)
            forked = fork_round_trip(node, folder)
            if not forked.trouble:
                yield CheckRunner(node, folder, (forked, fresh_round_trip()) if fresh else (forked,))
                return
        trips = (forked,)
    with Supervisor(SupervisorSettings.of_no_study(folder, Isolation.FRESH)) as supervisor:
        yield CheckRunner(LocalNode(supervisor), folder, (*trips, fresh_round_trip()))


# Run the checks of `dryfit doctor` in order: gather facts, run children, judge both.


OnNote = Callable[[str], None]

_ANY_GPU: Final = DeviceSpec(name="a GPU", capacity_bytes=1 << 40)
"""Where a machine has none: one with room for everything."""

_REHEARSED_S: Final = 300.0
"""Most seconds until the first optimizer step of what is rehearsed has ended, and as many after it: a look may take
less time than a plan, and is taken on machines without a GPU too."""

_WEIGHT_BYTES: Final = 4
"""Weights are kept in fp32."""


@dataclass(frozen=True, slots=True)
class CheckedStudy:
    """A study to check.

    Attributes:
        config: Its file, overrides included.
        space: Its search space.
        layout: Its folder, which need not exist.
        device: That trials are planned and steps of the user's own code are rehearsed for; None: this machine's
            smallest.
        prices: What its hours are charged by; None: by nothing.
    """

    config: StudyConfig
    space: Space
    layout: StudyLayout
    device: DeviceSpec | None = None
    prices: Prices | None = None


def examine(study: CheckedStudy | None, *, machine: bool, on_note: OnNote, rows: bool = True) -> Iterator[Finding]:
    """Check a machine, a study, or both.

    Args:
        study: The study; None: the machine alone.
        machine: Whether the machine is checked too.
        on_note: Called with a line on what is being done.
        rows: Whether a study's rows, models and function are checked, besides its file, folder and ledger.
    """
    on_note("starting children")
    folder = Path(tempfile.mkdtemp(prefix="dryfit-doctor-"))
    isolation = study.config.runtime.isolation if study is not None else Isolation.AUTO
    names_log = False
    try:
        with open_check_runner(folder, isolation, fresh=machine) as runner:
            for finding in _findings(study, runner, on_note, machine=machine, rows=rows):
                names_log = names_log or str(folder) in f"{finding.found} {finding.fix}"
                yield finding
    finally:
        if not names_log:
            shutil.rmtree(folder, ignore_errors=True)


def _findings(
    study: CheckedStudy | None, runner: CheckRunner, on_note: OnNote, *, machine: bool, rows: bool
) -> Iterator[Finding]:
    if machine:
        yield from machine_findings(machine_facts(os.environ, Path.home()), runner.trips)
    if study is not None:
        yield from _study(study, runner, on_note, rows=rows)


def _on_this_machine(config: StudyConfig) -> StudyConfig:
    """Return a configuration for what is looked at here, which needs no GPU where trials run on those of others."""
    if config.nodes is None or not config.nodes.has_all_gpus(config.execution.device):
        return config
    execution = config.execution.model_copy(update={"device": "auto"})
    return config.model_copy(update={"execution": execution})


def _study(study: CheckedStudy, runner: CheckRunner, on_note: OnNote, *, rows: bool) -> Iterator[Finding]:
    layout = study.layout
    folder = look_at_folder(layout.folder)
    yield from folder_findings(study_checks.ABOUT, folder)
    record, state = study_checks.record_findings(study.config, study.space, layout)
    config = _on_this_machine(with_precision(study.config, recorded_precision(state) or Precision.FP32))
    space, drawn = study_checks.space_findings(config, study.space)
    yield space
    yield from study_checks.repeat_findings(study.config)
    yield study_checks.lock_finding(layout)
    yield from record
    study = replace(study, config=config)
    yield study_checks.cache_finding(layout, folder)
    yield study_checks.mirror_finding(config.search.mirror, layout, os.environ)
    yield from (study_checks.tracker_finding(entry, layout, os.environ) for entry in config.study.track)
    if not rows:
        return
    if config.function is not None:
        yield from _own(study, config.function, dict(drawn[0][0]) if drawn else {}, runner, on_note)
        return
    probe = runner.probe
    if probe is None:
        yield failed(DATA, "rows", "no child could be started to read them", "see the checks of the machine")
        return
    yield from device_findings(config, possible_values(config, study.space, "train.precision"), probe)
    on_note("reading every row")
    cache_dir = layout.cache if layout.folder.is_dir() and not folder.not_writable else runner.folder / "cache"
    try:
        resolved = _rows(config, study.space, cache_dir, runner)
    except DryfitError as error:
        yield failed_by(DATA, "rows", error)
        return
    yield from data_findings(resolved, config.data.num_labels)
    yield from fold_findings(resolved.fold_rows)
    config = with_names(config, resolved)
    if (changed := study_checks.data_changed(state, resolved.data_fingerprint)) is not None:
        yield changed
    resolved = _with_device(config, resolved, probe)
    runner.node.learn(resolved)
    nodes = {runner.node.name: runner.node.facts}
    # Too few devices are a finding of their own; a rehearsal uses those that there are.
    processes = min(config.execution.processes, max(1, len(runner.node.facts.devices)))
    scope = CheckScope(
        config=config,
        space=study.space,
        fingerprint=resolved.data_fingerprint,
        device=resolved.device,
        visible_device=visible_devices(choose_place(resolved.device, nodes, processes=processes)),
        cores=runner.node.facts.cores,
        parallel=most_on_node(config, resolved.device, nodes, runner.node.name),
        cache_dir=cache_dir,
        scratch=runner.folder,
    )
    asked = batch_checks(scope, drawn)
    answers = dict(zip(asked, _check_batches(asked, runner, on_note), strict=True))
    for name, answer in answers.items():
        yield from model_findings(name, asked[name], answer, resolved.splits["train"].rows)
    yield from _disk(study, scope, folder, list(answers.values()))
    own = layout if cache_dir == layout.cache else StudyLayout(runner.folder)
    yield from _memory(study, resolved, nodes, own, on_note)


def _own(
    study: CheckedStudy, own: CalledCode, params: dict[str, Scalar], runner: CheckRunner, on_note: OnNote
) -> Iterator[Finding]:
    """Check the user's own function; what makes a Trainer is rehearsed for a point of the space."""
    config = study.config
    imported = _function(own, config.function_table, runner, on_note)
    yield imported
    if facts_of(config.study.task).makes_trainer and imported.status is Status.PASS:
        yield _rehearsed_step(study, own, params, runner, on_note)


def _function(own: CalledCode, table: str, runner: CheckRunner, on_note: OnNote) -> Finding:
    """Check whether the user's own function can be imported; it is not called."""
    on_note(f"importing {own.function}")
    body = ImportRequest(objective=own, table=table)
    job = ChildJob(f"importing {own.function}", body, runner.folder / "function", STANDALONE_LIMITS)
    try:
        run_job(job, runner.node)
    except DryfitError as error:
        return failed_by(study_checks.ABOUT, "function", error)
    return passed(study_checks.ABOUT, "function", f"{own.function} can be imported")


def _rehearsed_step(
    study: CheckedStudy, own: CalledCode, params: dict[str, Scalar], runner: CheckRunner, on_note: OnNote
) -> Finding:
    """Rehearse one step of what the user's function makes for a point of the space, on a virtual GPU."""
    named = ", ".join(
        f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}" for name, value in params.items()
    )
    doing = f"rehearsing one step of a trial with {named}" if named else "rehearsing one step of a trial"
    on_note(f"{doing}, for at most {2 * _REHEARSED_S / 60:.0f} minutes")
    config = study.config
    there = () if runner.probe is None else runner.probe.devices
    device = study.device or min(there, key=lambda each: each.capacity_bytes, default=_ANY_GPU)
    body = RehearsedPlanRequest(
        calling=calling_request(own, params=params, seed=config.study.seed),
        is_script=config.script is not None,
        device=device,
        allow=config.execution.allow,
        steps=1,
        timeout_s=_REHEARSED_S,
        calibration_dir=str(shared_traces(os.environ, Path.home()).parent),
    )
    try:
        job = ChildJob(doing, body, runner.folder / "step", STANDALONE_LIMITS)
        (answer,) = run_job(job, runner.node).answers
    except DryfitError as error:
        return failed_by(study_checks.ABOUT, "training", error)
    found = _step_finding(doing, answer)
    if answer.hours is None:
        return found
    return replace(found, found=f"{found.found}; {_hours_text(answer, answer.hours, study)}")


def _hours_text(answer: PlanAnswer, hours: Interval, study: CheckedStudy) -> str:
    """Return how long a training and all trials take on the device, and what they cost."""
    trials = study.config.study.trials
    cost = cost_of(times(hours, trials), answer.devices, answer.device, study.prices)
    return "; ".join(hours_lines(hours, trials, cost))


def _step_finding(doing: str, answer: PlanAnswer) -> Finding:
    about, check = study_checks.ABOUT, "training"
    if NOTHING_TAKEN in answer.reasons:
        return passed(about, check, f"{doing}: it trains, and takes nothing of a GPU")
    if not {NO_TORCH, NO_STEP_TAKEN}.isdisjoint(answer.reasons):
        return passed(about, check, f"{doing}: {'; '.join(answer.reasons)}; a trial of it runs alone on its device")
    if answer.verdict is VerdictKind.UNKNOWN:
        said, fix = f"{doing}: {'; '.join(answer.reasons)}", "if that is an error of your function, put it right"
        if FAILED_BY_ITSELF in answer.reasons:
            return failed(about, check, said, fix)
        return warned(about, check, said, f"{fix}; what cannot be rehearsed runs alone on its device")
    if answer.verdict is VerdictKind.REFUSED:
        return warned(about, check, f"{doing}: {refusal_text(answer)}", "search smaller values, or use a larger device")
    choice, how = answer.execution, ""
    if choice is not None and answer.verdict is VerdictKind.FITS_WITH:
        checkpointing = ", checkpointing" if choice.checkpointing else ""
        how = f" with micro-batch {choice.micro_batch} x {choice.accumulation}{checkpointing}"
    return passed(about, check, f"{doing}: it needs {gib(needed_bytes(answer))} of {answer.device.name}{how}")


def _rows(config: StudyConfig, space: Space, cache_dir: Path, runner: CheckRunner) -> ResolveResult:
    """Read and check all rows; models are checked later, each in a child of its own."""
    body = resolve_request(config, space, pairs=(), cache_dir=cache_dir, device="cpu")
    return run_job(ChildJob("reading every row", body, runner.folder / "rows", STANDALONE_LIMITS), runner.node)


def _with_device(config: StudyConfig, resolved: ResolveResult, probe: ProbeResult) -> ResolveResult:
    """Return the facts with those that RESOLVE would give of the device."""
    if device_of(config, probe) is DeviceKind.CPU:
        return resolved
    smallest, specs = smallest_device(probe.devices), probe.devices
    facts = {"device": DeviceKind.CUDA, "device_count": len(specs), "device_spec": smallest, "device_specs": specs}
    return resolved.model_copy(update=facts)


def _check_batches(
    asked: dict[str, BatchCheckRequest], runner: CheckRunner, on_note: OnNote
) -> list[BatchCheckResult | ChildError]:
    """Rehearse each model in a child, one after another: each may take most of the memory."""
    names = list(asked)
    jobs = [
        ChildJob(f"rehearsing {name}", body, runner.folder / f"model-{index}", STANDALONE_LIMITS)
        for index, (name, body) in enumerate(asked.items())
    ]
    on_note(f"rehearsing {len(names)} model(s)")
    return run_side_by_side(jobs, runner.node, most=1, on_done=lambda index: on_note(f"rehearsed {names[index]}"))


def _disk(
    study: CheckedStudy, scope: CheckScope, folder: FolderFacts, answers: Sequence[BatchCheckResult | ChildError]
) -> Iterator[Finding]:
    """Check whether the disk has room for the files of the largest model; nothing if no model could be loaded."""
    config = study.config
    checked = [answer for answer in answers if isinstance(answer, BatchCheckResult)]
    sizes = [answer.step.parameters for answer in checked if answer.step is not None]
    if not sizes or folder.not_writable:
        return
    need = disk_need(
        [_WEIGHT_BYTES * size for size in sizes],
        possible_values(config, study.space, "optim.name"),
        keep=config.runtime.keep,
        trials=config.study.trials,
        parallel=scope.parallel,
    ).with_folds(config.data.folds)
    yield study_checks.disk_finding(need, folder, taken_bytes(study.layout))


def _memory(
    study: CheckedStudy,
    resolved: ResolveResult,
    nodes: Mapping[str, NodeFacts],
    layout: StudyLayout,
    on_note: OnNote,
) -> Iterator[Finding]:
    """Plan the study's own values for the device that was named, or where trials would be planned."""
    device = study.device or planning_device(resolved, study.config.execution)
    if device is None:
        return
    execution, traces = study.config.execution, shared_traces(os.environ, Path.home())
    degrees = degrees_at_hand(study.config, resolved.device, nodes)
    host_bytes = host_bytes_for(execution, resolved.device, nodes.values())
    asked = PlanInput(study.config, study.space, device, traces, layout, degrees, host_bytes)
    try:
        answer = plan_trial(asked, on_note)
    except DryfitError as error:
        yield failed_by(study_checks.ABOUT, "memory", error)
        return
    if answer.verdict.fits:
        found = f"{gib(needed_bytes(answer))} needed of {gib(device.capacity_bytes)} on {device.name}"
        found += f", by each of {answer.devices} ranks that its model is sharded over" if answer.devices > 1 else ""
        found += f"; {_hours_text(answer, answer.hours, study)}" if answer.hours is not None else ""
        yield passed(study_checks.ABOUT, "memory", found)
    elif answer.verdict is VerdictKind.UNKNOWN:
        fix = "nothing: such trials run with no other beside them (execution.unknown)"
        yield warned(study_checks.ABOUT, "memory", f"unknown: {few(answer.reasons)}", fix)
    else:
        fix = "`dryfit plan` on this file names every change that would fit"
        yield failed(study_checks.ABOUT, "memory", refusal_text(answer), fix)
