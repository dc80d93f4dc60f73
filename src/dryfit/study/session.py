"""One session of work on a study: its machines, preparation, the loop, and giving everything back."""

import errno
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, cast

from dryfit.ledger.events import BaselinesComputed, Event, Resolved, SessionClosed, SessionOpened, StudyCreated
from dryfit.ledger.folder import StudyLayout, demand_known_attempts
from dryfit.ledger.ledger import Ledger, StudyLock, each_event
from dryfit.ledger.replay import StudyState
from dryfit.processes.child_spec import SupervisorSettings, demand_secrets, preload_of
from dryfit.processes.evidence import EvidenceCollector
from dryfit.processes.gpus import NvmlLink
from dryfit.processes.helpers import marker_of, sweep
from dryfit.processes.node import LocalNode, NodeFacts, Nodes, first_node
from dryfit.processes.supervisor import Supervisor
from dryfit.search.changes import TakenPoints, comparability_key, not_taken, take_points
from dryfit.search.followers import demand_trackers, followed, followers_of, storage_url
from dryfit.search.samplers import demand_package, drawn_otherwise
from dryfit.search.space import Space
from dryfit.settings.check_messages import ProbeRequest
from dryfit.settings.choices import Precision
from dryfit.settings.errors import DryfitError, FileError, LedgerError, MachineError
from dryfit.settings.files import NO_ROOM, closing, contents, write_text_atomic
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, smallest_device
from dryfit.settings.study_file import TOP, StudyConfig
from dryfit.settings.study_file_text import dump_toml
from dryfit.settings.tables import HUB_PREFIX, CalledCode
from dryfit.settings.task_facts import facts_of, reads, task_word
from dryfit.settings.text import sendable
from dryfit.settings.training_messages import BaselinesRequest, ImportRequest, ResolveResult
from dryfit.settings.user_code import FunctionName
from dryfit.settings.version import VERSION
from dryfit.settings.wire import STACKS_FILE, digest, since_boot_s, steady_clock
from dryfit.study.child_jobs import ChildJob, run_job
from dryfit.study.context import StudyContext, devices_without_torch, job_of_trials, possible_values
from dryfit.study.driver import StopRequests, StopSignals, stacks_on_request
from dryfit.study.files import check_disk, study_need, taken_bytes
from dryfit.study.generations import basis_now, next_generation, recorded
from dryfit.study.loop import TrialDecider
from dryfit.study.next_step import End, has_all_trials
from dryfit.study.observers import Observer, in_threads, listeners
from dryfit.study.pace import decide, recorded_precision, with_precision
from dryfit.study.requests import preparing_limits, resolve_request, with_names
from dryfit.tasks.scored_rows import FACTS_FILE

# The machines of a session: this one, and where the study file has ``[nodes]`` those that agents join with.


_WAIT_S = 0.5


@dataclass(frozen=True, slots=True)
class StudyNodes:
    """The machines of a session.

    Attributes:
        local: This machine.
        nodes: All of them.
        joining: What each has that trials may run on, by name, which changes as agents come and go; None: none do.
    """

    local: LocalNode
    nodes: Nodes
    joining: Mapping[str, NodeFacts] | None = None

    def facts(self) -> Mapping[str, NodeFacts]:
        """Return what each machine has that trials may run on, by name."""
        return self.joining if self.joining is not None else {name: one.facts for name, one in self.nodes.all().items()}

    def has_one(self, is_stopping: Callable[[], bool]) -> bool:
        """Wait until there is a machine for trials; False: a stop was asked for meanwhile."""
        while not self.facts():
            if is_stopping():
                return False
            self.nodes.wait(_WAIT_S)
        return True


@contextmanager
def study_nodes(
    work: "StudyWork",
    settings: SupervisorSettings,
    supervisor: Supervisor,
    local: LocalNode,
    observers: Sequence[Observer],
) -> Generator[StudyNodes, None, None]:
    """Open the machines of a session; agents are told when it is over.

    Args:
        work: The study.
        settings: How children are made here, and on other machines.
        supervisor: Keeps the children of this machine, and waits for agents too.
    """
    config, layout, wish = work.config, work.layout, work.config.nodes
    if wish is None:
        yield StudyNodes(local, local)
        return
    note = partial(_note, observers)
    from dryfit.processes.agent_link import listening, publish, token_of
    from dryfit.processes.connection import control_context
    from dryfit.processes.joined_nodes import JoinedNodes, Listener, Terms, left_running
    from dryfit.processes.launch import launched, listen_host
    from dryfit.processes.node_messages import Welcome

    tls, fingerprint = control_context(layout) if wish.tls else (None, "")
    listener = Listener(listening(listen_host(wish), wish.port), token_of(layout), since_boot_s, tls)
    welcome = Welcome(
        node="",
        session=uuid.uuid4().hex,
        heard=0,
        lease_s=wish.lease_s,
        marker=settings.marker,
        folder=str(layout.folder),
        needs=_needs(config),
        isolation=settings.isolation,
        preload=settings.preload,
        jobs=(job_of_trials(config),),
    )
    names = {node.joined.agent: known for earlier in work.state.sessions for known, node in earlier.nodes.items()}
    left = left_running(work.state, layout)
    terms = Terms(welcome, work.created.id, config.runtime.stop_grace_s, wish.local, names, left)
    joined = JoinedNodes(
        local, listener, terms, partial(_write, work, observers), note, since_boot_s, heard=partial(_mark_heard, layout)
    )
    supervisor.watch(listener.fileno())
    try:
        with launched(wish, layout, note), ExitStack() as over:
            over.callback(joined.close, "the session of the study is over")
            over.callback(layout.node_address.unlink, missing_ok=True)  # who comes later finds no address
            address = publish(layout, listener.address, work.created.id, welcome.session, fingerprint)
            note(f"listening for nodes on {address.host}, port {address.port}: dryfit agent {layout.folder}")
            if fingerprint:
                note(f"they speak TLS; elsewhere an agent needs --fingerprint {fingerprint}")
            yield StudyNodes(local, joined, joined.placeable)
    finally:
        supervisor.forget(listener.fileno())
        listener.close()


def _mark_heard(layout: StudyLayout, node: str) -> None:
    """Give a node's file the time of now, for whoever looks; trouble with its folder is told of elsewhere."""
    file = layout.node_heard(node)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def _needs(config: StudyConfig) -> tuple[str, ...]:
    """Return the files and folders that trials read, as far as the study file names them."""
    data, own = config.data, config.function
    named = [data.train, data.validation, data.test, data.file, config.model.name, config.joint.criteria_model]
    paths = [*named, *(own.paths if own is not None else ())]
    return tuple(dict.fromkeys(path for path in paths if path and Path(path).is_absolute() and Path(path).exists()))


# What comes before the first trial: a RESOLVE child reads and tokenises the data and looks at the machine.
#
# Then a BASELINES child finds out what the metric is worth without a model. Where trials call a function of the
# user's own, an IMPORT child imports it instead of both.


def prepare(
    config: StudyConfig, layout: StudyLayout, space: Space, nodes: Nodes, stops: StopRequests
) -> ResolveResult | None:
    """Run RESOLVE, or IMPORT where trials call a function of the user's own.

    Returns:
        The facts; None if a stop was asked for meanwhile.

    Raises:
        DryfitError: What the child raised: bad data, an unknown model, a machine that cannot do what was asked, a
            function that cannot be imported.
        ChildError: The child failed in another way, or died several times.
    """
    if config.function is not None:
        return _import_function(config, config.function, layout, nodes, stops)
    body = resolve_request(
        config,
        space,
        pairs=space.model_length_pairs(config.trial_settings),
        cache_dir=layout.cache,
        device=config.execution.device,
        elsewhere=_elsewhere(config),
        precisions=possible_values(config, space, "train.precision"),
    )
    job = ChildJob("checking data and machine", body, layout.preparations, preparing_limits(config.runtime))
    return run_job(job, nodes, stops)


def _import_function(
    config: StudyConfig, own: CalledCode, layout: StudyLayout, nodes: Nodes, stops: StopRequests
) -> ResolveResult | None:
    elsewhere = _elsewhere(config)
    gpus = 0 if elsewhere else len(first_node(nodes).facts.devices)
    device, count = (DeviceKind.CUDA, 0) if elsewhere else devices_without_torch(config.execution.device, gpus)
    body, limits = ImportRequest(objective=own, table=config.function_table), preparing_limits(config.runtime)
    job = ChildJob(f"importing {own.function}", body, layout.preparations, limits)
    result = run_job(job, nodes, stops)
    if result is None:
        return None
    specs: tuple[DeviceSpec, ...] = ()
    if count and device is DeviceKind.CUDA and facts_of(config.study.task).makes_trainer:
        looking = ChildJob("looking at the devices", ProbeRequest(), layout.preparations, limits)
        found = run_job(looking, nodes, stops)
        if found is None:
            return None
        specs = found.devices
    return ResolveResult(
        data_fingerprint="",
        splits={},
        revisions={own.function: result.source_hash},
        own_file=result.source_file,
        device=device,
        device_count=count,
        device_spec=smallest_device(specs),
        device_specs=specs,
        versions=result.versions,
    )


def _elsewhere(config: StudyConfig) -> bool:
    return config.nodes is not None and config.nodes.has_all_gpus(config.execution.device)


def find_baselines(
    config: StudyConfig,
    layout: StudyLayout,
    state: StudyState,
    resolved: ResolveResult,
    nodes: Nodes,
    stops: StopRequests,
    tell: Callable[[str], None],
) -> BaselinesComputed | None:
    """Compute the baselines of the metric.

    Args:
        config: With the thresholds of :func:`with_fitted_thresholds`.
        tell: Is told what goes on, and why there are no baselines.

    Returns:
        The event, not written yet. None: nothing is left to find out, it could not be, or a stop was asked for.
    """
    if _are_known(config, layout, state, resolved):
        return None
    tell("computing baselines")
    try:
        return _compute(config, layout, resolved, nodes, stops)
    except DryfitError as error:
        tell(f"the study goes on without baselines: {error}")
        return None


def with_fitted_thresholds(config: StudyConfig, space: Space) -> StudyConfig:
    """Return the configuration with every threshold fitted on validation that is so in a trial.

    What is fitted there is scored there, so that a baseline without it would be beaten by luck.
    """

    def in_a_trial(key: str) -> bool:
        return reads(config.study.task, key) and "calibrated" in possible_values(config, space, key)

    head, span = config.head, config.span
    if (config.data.multi_label or config.data.num_labels == 2) and in_a_trial("head.threshold"):
        head = head.model_copy(update={"threshold": "calibrated"})
    if in_a_trial("span.null_policy"):
        span = span.model_copy(update={"null_policy": "calibrated"})
    return config.model_copy(update={"head": head, "span": span})


def _are_known(config: StudyConfig, layout: StudyLayout, state: StudyState, resolved: ResolveResult) -> bool:
    """Whether nothing is left to find out: the study has its baselines, wants none, or its task can have none."""
    if config.function is not None or config.study.baselines_s == 0:
        return True
    known = state.baselines is not None and state.baselines.key == _baselines_key(config, resolved)
    return known and (layout.baselines / FACTS_FILE).is_file()


def _compute(
    config: StudyConfig, layout: StudyLayout, resolved: ResolveResult, nodes: Nodes, stops: StopRequests
) -> BaselinesComputed | None:
    """Run BASELINES; None if a stop was asked for meanwhile."""
    body = BaselinesRequest(
        task=config.study.task,
        metric=config.study.metric,
        direction=config.study.resolved_direction,
        data=config.data,
        settings=config.trial_settings,
        cache_dir=str(layout.cache),
        data_fingerprint=resolved.data_fingerprint,
        out_dir=str(layout.baselines),
        limit_s=config.study.baselines_s,
    )
    job = ChildJob("computing baselines", body, layout.preparations, preparing_limits(config.runtime))
    result = run_job(job, nodes, stops)
    return None if result is None else BaselinesComputed(key=_baselines_key(config, resolved), result=result)


def _baselines_key(config: StudyConfig, resolved: ResolveResult) -> str:
    """Return a hash of all that decides the baselines, wherever the study lies."""
    settings, data = config.trial_settings, config.data
    decides = [
        str(config.study.task),
        str(config.study.metric),
        str(config.study.resolved_direction),
        resolved.data_fingerprint,
        [data.num_labels, data.multi_label, data.folds, data.split_seed],
    ]
    if facts_of(config.study.task).spans:  # whether thresholds are fitted
        decides.append(settings.span.null_policy)
    if settings.head.threshold == "calibrated":
        decides.append("head.threshold")
    if facts_of(config.study.task).decoder:  # its loss is one of tokens
        decides += [
            settings.model.model_dump(mode="json"),
            settings.lm.model_dump(mode="json"),
            settings.train.max_length,
        ]
    return digest(decides)


# One session of work on a study, from taking its lock to giving it back.


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
    around = EvidenceCollector(devices, work.layout.folder)
    work.layout.logs.mkdir(exist_ok=True)
    settings = SupervisorSettings(
        marker=work.marker,
        wakeup_fifo=work.layout.wakeup_fifo,
        isolation=work.config.runtime.isolation,
        server_log=work.layout.logs / "forkserver.txt",
        preload=preload_of(work.config),
        probe=around.probe,
    )
    supervisor = stack.enter_context(Supervisor(settings))
    local = LocalNode(supervisor, devices, placed=around.placed)
    return stack.enter_context(study_nodes(work, settings, supervisor, local, observers))


def _work(work: StudyWork, machines: StudyNodes, stops: StopRequests, observers: Sequence[Observer]) -> End:
    own, node, layout, tell = work.config.function, machines.nodes, work.layout, partial(_note, observers)
    tell("checking data and models" if own is None else f"importing {own.function}")
    resolved = prepare(work.config, layout, work.space, node, stops)
    if resolved is None:
        return stops.why or End.STOPPED
    config = with_precision(with_names(work.config, resolved), recorded_precision(work.state) or Precision.FP32)
    # While the fork server still imports the rest:
    fitted = with_fitted_thresholds(config, work.space)
    baselines = find_baselines(fitted, layout, work.state, resolved, node, stops, tell)
    decided = decide(work.config, work.space, layout, resolved, node, stops, recorded_precision(work.state))
    if stops.why is not None:
        return stops.why
    if decided.note:
        tell(decided.note)
    if decided.config.train.precision is not work.config.train.precision:
        frozen = with_precision(work.config, decided.config.train.precision)
        write_text_atomic(layout.frozen_file, dump_toml(frozen, layout.folder))
    work = replace(work, config=with_names(decided.config, resolved))
    for text in _revisions_changed(work, resolved):
        tell(text)
    following = next_generation(work.state, basis_now(work.config, work.space, layout, resolved))
    new = None if resolved == work.state.resolved else Resolved(result=resolved)
    for event in (following, new, baselines):
        if event is not None:
            _write(work, observers, event)
    machines.local.learn(resolved)
    done = has_all_trials(work.state, config.study.trials)
    if not done and not machines.has_one(stops.asked):
        return stops.why or End.STOPPED
    context = StudyContext(
        config=work.config,
        layout=layout,
        space=work.space,
        ledger=work.ledger,
        state=work.state,
        resolved=resolved,
        nodes=machines.facts(),
    )
    free_bytes = shutil.disk_usage(layout.folder).free
    check_disk(study_need(context), free_bytes=free_bytes, taken_bytes=taken_bytes(layout), place=layout.folder)
    return TrialDecider(context, node, stops, observers, work.clock).run()


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


def _tell(observers: Sequence[Observer], event: Event, state: StudyState) -> None:
    for observer in observers:
        observer.on_event(event, state)


def _write(work: StudyWork, observers: Sequence[Observer], event: Event) -> None:
    _tell(observers, work.ledger.append(event), work.state)


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


# Whether a study is done, judged by its files alone, so that another run of it starts nothing.


_FINAL: Final = {str(end): end for end in End if end.is_final}


def finished(config: StudyConfig, layout: StudyLayout) -> SessionResult | None:
    """Return a finished study unchanged; None where there may be work left.

    Its last session must have reached the study's own end with the configuration of now, its rows must not have been
    touched since that session began, and its mirror and trackers must have all of the ledger. Rows on the hub may have
    changed without a trace on this machine.

    Raises:
        LedgerError: The ledger cannot be read.
    """
    try:
        if not layout.ledger.is_file():
            return None
        state = read_study(layout) if config.train.precision is Precision.AUTO else None
        if state is not None:
            config = with_precision(config, recorded_precision(state))
        if contents(layout.frozen_file) != dump_toml(config, layout.folder).encode():
            return None
        state = state or read_study(layout)
        last = state.sessions[-1] if state.sessions else None
        end = _FINAL.get(last.closed or "") if last is not None else None
        if last is None or end is None or not _untouched(config, last.opened_at_s):
            return None
        if any(follower.left_bytes for follower in followers_of(config, layout)):
            return None
    except OSError:
        return None  # no frozen.toml yet, or a session will say what is wrong with the folder
    return SessionResult(end, state, layout)


def _untouched(config: StudyConfig, since_s: float) -> bool:
    """Whether no file of rows was changed, or put in the place of another, since a moment (Unix seconds)."""
    for source in _texts(config.data.model_dump()) if config.function is None else ():
        if source.startswith(HUB_PREFIX):
            return False
        file = Path(source)
        if not file.is_absolute():
            continue  # a name of a column or a language: sources are absolute once they are read
        # The change of the inode: a file that is moved here, or copied with its times, is an old one by its mtime.
        if not file.is_file() or file.stat().st_ctime >= since_s:
            return False
    return True


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[str, object]", value).values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[object]", value):
            yield from _texts(item)
