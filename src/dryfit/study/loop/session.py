"""One session of work on a study, from taking its lock to giving it back."""

import errno
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dryfit.config.freeze import dump_toml
from dryfit.config.schema import TOP, StudyConfig
from dryfit.core.cleanup import closing
from dryfit.core.clock import steady_clock
from dryfit.core.errors import FileError, LedgerError, MachineError
from dryfit.core.jobs.train import ResolveResult
from dryfit.core.regular_files import NO_ROOM
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.functions import FunctionName
from dryfit.core.settings.task_facts import task_word
from dryfit.core.text.words import sendable
from dryfit.core.version import VERSION
from dryfit.core.wire import STACKS_FILE, write_text_atomic
from dryfit.runtime.children.child_spec import SupervisorSettings, preload_of
from dryfit.runtime.children.environment import demand_secrets
from dryfit.runtime.children.processes import marker_of, sweep
from dryfit.runtime.children.supervisor import Supervisor
from dryfit.runtime.failures.evidence import EvidenceCollector
from dryfit.runtime.machine.local_node import LocalNode
from dryfit.runtime.machine.nvml_link import NvmlLink
from dryfit.search.changes import comparability_key
from dryfit.search.followers.keeper import followed
from dryfit.search.followers.targets import demand_trackers, storage_url
from dryfit.search.other_study import TakenPoints, not_taken, take_points
from dryfit.search.sampling.samplers import demand_package, drawn_otherwise
from dryfit.search.space.space import Space
from dryfit.store.events import Event, Resolved, SessionClosed, SessionOpened, StudyCreated
from dryfit.store.layout import StudyLayout
from dryfit.store.ledger import Ledger, each_event
from dryfit.store.lock import StudyLock
from dryfit.store.replay import StudyState
from dryfit.store.unknown_attempts import demand_known_attempts
from dryfit.study.loop.generations import basis_now, next_generation, recorded
from dryfit.study.loop.listeners import listeners
from dryfit.study.loop.next_step import End, has_all_trials
from dryfit.study.loop.observers import Observer, in_threads
from dryfit.study.loop.prepare import find_baselines, prepare, with_fitted_thresholds
from dryfit.study.loop.stops import StopRequests, StopSignals, stacks_on_request
from dryfit.study.loop.study_run import TrialDecider
from dryfit.study.planning.measured_pace import decide
from dryfit.study.planning.pace import recorded_precision, with_precision
from dryfit.study.resources.disk import check_disk, study_need, taken_bytes
from dryfit.study.resources.study_nodes import JoinTerms, StudyNodes, study_nodes
from dryfit.study.trials.child_requests import with_names
from dryfit.study.trials.context import StudyContext

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@dataclass(frozen=True, slots=True)
class SessionResult:
    """How a session ended, and the study as it is now.

    Attributes:
        why: What the control process itself could not go on without; empty where it was something else.
    """

    end: End
    state: StudyState
    layout: StudyLayout
    why: str = ""


def read_study(layout: StudyLayout) -> StudyState:
    """Read a study's ledger without its lock, and return its state.

    Raises:
        LedgerError: There is no study, or its ledger cannot be read.
    """
    return folded(each_event(layout.ledger), layout)


def folded(events: Iterable[Event], layout: StudyLayout) -> StudyState:
    """Return the state of a study after the events of its ledger.

    Raises:
        LedgerError: It is empty: there is no study.
    """
    state = StudyState()
    for event in events:
        state.apply(event)
    if state.created is None:
        raise LedgerError(
            f"reading the study in {layout.folder}",
            "there is none (no ledger.jsonl with a first event)",
            hint=f"start it with `dryfit tune {layout.study_file}`",
        )
    return state


def run_session(
    config: StudyConfig,
    space: Space,
    layout: StudyLayout,
    observers: Sequence[Observer] = (),
    signals: StopSignals | None = None,
) -> SessionResult:
    """Work on a study until it is done or a stop is asked for.

    Args:
        config: The resolved study file, overrides included.
        space: Its search space.
        layout: Where the study lies; made when absent.
        observers: Watch the session, each in a thread of its own, beside those of ``study.listeners``.
        signals: Handlers of signals to stop; None: the session installs its own while it lasts.

    Raises:
        DryfitError: It could not start: bad data, another process, another study in the folder, no room for it.
        OSError: The ledger could not be written for another reason than a full disk; what it holds is safe.
    """
    if sendable(str(layout.folder)) != str(layout.folder):
        raise MachineError(f"opening the study in {layout.folder}", "its path is not UTF-8", "a path that is text")
    _demand(config, layout)
    observers = (*observers, *listeners(config.study.listeners))
    with ExitStack() as stack:
        observers = stack.enter_context(in_threads(observers))  # the last to be left: by then the study has let go
        with _opening(layout):
            layout.folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(StudyLock(layout.lock))
            for observer in observers:
                observer.on_open(layout)
            for observer in observers:
                observer.check()
            work = _open(config, space, layout, observers, stack)
            devices = NvmlLink(work.marker, layout.logs / "nvml.txt", lambda text: _note(observers, text))
            stack.push(closing(devices.close))
            machines = _machines(work, devices, observers, stack)
            stack.enter_context(stacks_on_request(layout.logs / STACKS_FILE))

            def check() -> None:
                work.ledger.check()
                lock.keep()

            stops = stack.enter_context(StopRequests(layout.stop_request, machines.nodes.wake, signals, check))
            following = followed(work.config, layout, lambda text: _note(observers, text))
            keepers = stack.enter_context(following)
        why = ""
        try:
            end = _work(work, machines, stops, (*observers, *keepers))
            _tell(observers, work.ledger.append(SessionClosed(reason=end)), work.state)
        except (OSError, FileError) as error:
            work.ledger.check()  # a folder that was moved or deleted is the reason for all that fails in it
            if not isinstance(error, OSError) or error.errno not in NO_ROOM:
                raise
            end, why = End.PAUSED, f"{_no_room(error)}, the study is paused: {error}"
            _note(observers, why)
    return SessionResult(end, work.state, layout, why)


def _demand(config: StudyConfig, layout: StudyLayout) -> None:
    """Refuse a session that lacks a variable or a package."""
    storage_url(config.search.mirror, os.environ)  # refused here where its variable is not set; it is kept nowhere
    demand_trackers(config.study.track, layout.folder, os.environ)
    demand_secrets(config.function, os.environ, table=config.function_table)
    demand_package(config.search.sampler)


def _no_room(error: OSError) -> str:
    limited = error.errno == errno.EFBIG
    return "a file may not grow further (`ulimit -f`)" if limited else "the disk is full"


@contextmanager
def _opening(layout: StudyLayout) -> Generator[None, None, None]:
    """Turn the error of a folder that cannot be written to into one for the user."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*NO_ROOM, *_NOT_WRITABLE):
            raise
        raise MachineError(
            f"opening the study in {layout.folder}",
            f"{error.strerror}" + (f": {error.filename}" if error.filename else ""),
            "a folder that can be written to, on a disk with room",
        ) from error


@dataclass(frozen=True, slots=True)
class StudyWork:
    """An opened study, before its data is resolved."""

    config: StudyConfig
    layout: StudyLayout
    space: Space
    ledger: Ledger
    state: StudyState
    created: StudyCreated
    marker: str
    clock: Callable[[], float]


def _open(
    config: StudyConfig, space: Space, layout: StudyLayout, observers: Sequence[Observer], stack: ExitStack
) -> StudyWork:
    """Replay the ledger, or begin one; kill what an earlier run left behind; record that a session has begun."""
    state = StudyState()
    clock = steady_clock()
    ledger = Ledger(layout.ledger, apply=state.apply, clock=clock)
    stack.push(closing(ledger.close))
    demand_known_attempts(state, layout)
    taken = _taken(config, space, state)
    study = state.created or _created(config, space, layout, taken)
    missing = recorded(state, layout)
    if state.created is None:
        ledger.append(study)
    elif missing is not None:  # before the file is replaced from which it is known
        ledger.append(missing)
    marker = marker_of(study.id, layout.folder)
    killed = sweep(marker)
    notes = (f"ended {len(killed)} process(es) that an earlier run left behind",) if killed else ()
    if left := drawn_otherwise(space, config.search.sampler):
        notes += (f"{config.search.sampler} leaves to tpe: {', '.join(left)} (conditional, or a choice)",)
    write_text_atomic(layout.frozen_file, dump_toml(with_precision(config, recorded_precision(state)), layout.folder))
    opened = SessionOpened(
        pid=os.getpid(),
        host=platform.node(),
        version=VERSION,
        total=config.study.trials,
        parallel=config.runtime.parallel if config.runtime.parallel != "auto" else 1,  # found out once data are read
        notes=(*notes, *taken.notes),
    )
    _tell(observers, ledger.append(opened), state)
    return StudyWork(config, layout, space, ledger, state, study, marker, clock)


def _machines(work: StudyWork, devices: NvmlLink, observers: Sequence[Observer], stack: ExitStack) -> StudyNodes:
    """Open what children run on: this machine, and where the study file says so those that join."""

    def write(event: Event) -> None:
        _tell(observers, work.ledger.append(event), work.state)

    around = EvidenceCollector(devices, work.layout.folder)
    settings = _supervisor_settings(work, around)
    supervisor = stack.enter_context(Supervisor(settings))
    local = LocalNode(supervisor, devices, placed=around.placed)
    terms = JoinTerms(work.config, work.layout, work.state, settings, write, lambda text: _note(observers, text))
    return stack.enter_context(study_nodes(terms, supervisor, local))


def _work(work: StudyWork, machines: StudyNodes, stops: StopRequests, observers: Sequence[Observer]) -> End:
    own, node = work.config.function, machines.nodes
    _note(observers, "checking data and models" if own is None else f"importing {own.function}")
    resolved = prepare(work.config, work.layout, work.space, node, stops)
    if resolved is None:
        return stops.why or End.STOPPED
    config = with_precision(with_names(work.config, resolved), recorded_precision(work.state) or Precision.FP32)
    tell = partial(_note, observers)  # while the fork server still imports the rest:
    fitted = with_fitted_thresholds(config, work.space)
    baselines = find_baselines(fitted, work.layout, work.state, resolved, node, stops, tell)
    decided = decide(work.config, work.space, work.layout, resolved, node, stops, recorded_precision(work.state))
    if stops.why is not None:
        return stops.why
    if decided.note:
        _note(observers, decided.note)
    _freeze_precision(work, decided.config)
    work = replace(work, config=with_names(decided.config, resolved))
    for text in _revisions_changed(work, resolved):
        _note(observers, text)
    following = next_generation(work.state, basis_now(work.config, work.space, work.layout, resolved))
    if following is not None:
        _tell(observers, work.ledger.append(following), work.state)
    if resolved != work.state.resolved:
        _tell(observers, work.ledger.append(Resolved(result=resolved)), work.state)
    if baselines is not None:
        _tell(observers, work.ledger.append(baselines), work.state)
    machines.local.learn(resolved)
    done = has_all_trials(work.state, config.study.trials)
    if not done and not machines.has_one(stops.asked):
        return stops.why or End.STOPPED
    context = StudyContext(
        config=work.config,
        layout=work.layout,
        space=work.space,
        ledger=work.ledger,
        state=work.state,
        resolved=resolved,
        nodes=machines.facts(),
    )
    _check_room(context)
    return TrialDecider(context, node, stops, observers, work.clock).run()


def _freeze_precision(work: StudyWork, decided: StudyConfig) -> None:
    """Write the number format that was decided into the frozen configuration."""
    if decided.train.precision is not work.config.train.precision:
        frozen = with_precision(work.config, decided.train.precision)
        write_text_atomic(work.layout.frozen_file, dump_toml(frozen, work.layout.folder))


def _revisions_changed(work: StudyWork, resolved: ResolveResult) -> list[str]:
    """Return a sentence for each model or function that has changed since the trials so far; the user must judge it."""
    before, own = work.state.resolved, work.config.function
    if before is None or not work.state.present:
        return []
    changed = [name for name, found in resolved.revisions.items() if before.revisions.get(name, found) != found]
    task = task_word(work.config.study.task)
    keys = {task: "study.task_version"} if own is None else {own.function: f"{work.config.function_table}.version"}
    if (metric := work.config.lm.metric) is not None:
        keys[FunctionName.parse(metric).short] = "lm.metric"
    hint = "it is up to you whether they compare; with another {} a new generation begins"
    return [
        f"{name} has changed since the trials so far: {hint.format(keys.get(name, 'model.revision'))}"
        for name in changed
    ]


def _check_room(study: StudyContext) -> None:
    folder = study.layout.folder
    free_bytes = shutil.disk_usage(folder).free
    check_disk(study_need(study), free_bytes=free_bytes, taken_bytes=taken_bytes(study.layout), place=folder)


def _tell(observers: Sequence[Observer], event: Event, state: StudyState) -> None:
    for observer in observers:
        observer.on_event(event, state)


def _note(observers: Sequence[Observer], text: str) -> None:
    for observer in observers:
        observer.on_note(text)


def _taken(config: StudyConfig, space: Space, state: StudyState) -> TakenPoints:
    """Return the points that a new study takes from another one; a study that goes on has them in its ledger."""
    source = config.search.enqueue_from
    if source is None or state.created is not None:
        return TakenPoints(notes=not_taken(source, state.created.points_from) if source and state.created else ())
    folder, _, count = source.rpartition(TOP)
    return take_points(read_study(StudyLayout(Path(folder))), int(count), source, space)


def _created(config: StudyConfig, space: Space, layout: StudyLayout, taken: TakenPoints) -> StudyCreated:
    basis = comparability_key(config, space, data="", folder=layout.folder)
    goal, *also = basis.goals
    return StudyCreated(
        id=uuid.uuid4().hex,
        name=config.study.name,
        task=config.study.task,
        metric=goal.name,
        direction=goal.direction,
        also=tuple(also),
        seed=config.study.seed,
        space=basis.space,
        own=basis.own,
        function=basis.function,
        folder=basis.folder,
        points_from=config.search.enqueue_from or "",
        points=taken.points,
    )


def _supervisor_settings(work: StudyWork, around: EvidenceCollector) -> SupervisorSettings:
    work.layout.logs.mkdir(exist_ok=True)
    return SupervisorSettings(
        marker=work.marker,
        wakeup_fifo=work.layout.wakeup_fifo,
        isolation=work.config.runtime.isolation,
        server_log=work.layout.logs / "forkserver.txt",
        preload=preload_of(work.config),
        probe=around.probe,
    )
