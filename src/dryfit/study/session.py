"""One stretch of work on a study: from taking its lock to giving it back."""

import os
import platform
import uuid
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dryfit.config.freeze import check_resumable, dump_toml
from dryfit.config.load import load_study_file
from dryfit.config.schema import StudyConfig
from dryfit.core.errors import LedgerError, StudyMismatchError
from dryfit.core.version import VERSION
from dryfit.core.wire import Message, ResolveResult, write_text_atomic
from dryfit.runtime.orphans import sweep
from dryfit.runtime.spec import SupervisorSettings
from dryfit.runtime.supervisor import Supervisor
from dryfit.search.compat import compare
from dryfit.search.mirror import MirrorProcess
from dryfit.search.space import Space
from dryfit.store.events import Event, Resolved, SessionClosed, SessionOpened, StudyCreated
from dryfit.store.layout import StudyLayout
from dryfit.store.ledger import Ledger, StudyLock, read_ledger
from dryfit.store.replay import StudyState
from dryfit.study.devices import available_cores
from dryfit.study.loop import StudyContext, StudyLoop
from dryfit.study.machine import End
from dryfit.study.observers import Observer
from dryfit.study.prepare import prepare
from dryfit.study.stops import StopRequests

_MIRROR_FLUSH_S = 10.0


@dataclass(frozen=True, slots=True)
class SessionResult:
    """How a session ended, and the study as it is now."""

    end: End
    state: StudyState
    layout: StudyLayout


def read_study(layout: StudyLayout) -> StudyState:
    """Fold a study's ledger without owning it.

    Raises:
        LedgerError: There is no study, or its ledger cannot be read.
    """
    state = StudyState()
    for event in read_ledger(layout.ledger):
        state.apply(event)
    if state.created is None:
        raise LedgerError(
            f"reading the study in {layout.folder}",
            "there is none (no ledger.jsonl with a first event)",
            hint=f"start it with `dryfit tune {layout.study_file}`",
        )
    return state


def run_session(
    config: StudyConfig, space: Space, layout: StudyLayout, observers: Sequence[Observer] = ()
) -> SessionResult:
    """Work on a study until it is done or a stop is asked for.

    Args:
        config: The resolved study file, overrides included.
        space: Its search space.
        layout: Where the study lies; made when absent.
        observers: Who is told.

    Raises:
        DryfitError: It could not start: bad data, another process, another study in the folder.
        OSError: The ledger could not be written; what it holds is safe.
    """
    layout.folder.mkdir(parents=True, exist_ok=True)
    with StudyLock(layout.lock), ExitStack() as stack:
        state = StudyState()
        notes = _check_folder(config, layout, space)
        ledger = Ledger(layout.ledger, fold=state.apply)
        stack.callback(ledger.close)
        if state.created is None:
            ledger.append(_created(config, space))
        assert state.created is not None
        killed = sweep(state.created.id)
        if killed:
            notes = (*notes, f"ended {len(killed)} process(es) that an earlier run left behind")
        write_text_atomic(layout.frozen_file, dump_toml(config, layout.folder))
        opened = SessionOpened(
            pid=os.getpid(), host=platform.node(), version=VERSION, total=config.study.trials, notes=notes
        )
        _tell(observers, ledger.append(opened), state)
        supervisor = stack.enter_context(Supervisor(_supervisor_settings(config, layout, state.created.id)))
        stops = stack.enter_context(StopRequests(layout.stop_request, supervisor.wake))
        with _mirror(config, layout, state) as keepers:
            watchers = (*observers, *keepers)
            end = _work(StudyWork(config, layout, space, ledger, state), supervisor, stops, watchers)
            _tell(observers, ledger.append(SessionClosed(reason=end)), state)
    return SessionResult(end, state, layout)


@dataclass(frozen=True, slots=True)
class StudyWork:
    """An opened study, before its data is resolved."""

    config: StudyConfig
    layout: StudyLayout
    space: Space
    ledger: Ledger
    state: StudyState


def _work(work: StudyWork, supervisor: Supervisor, stops: StopRequests, observers: Sequence[Observer]) -> End:
    for observer in observers:
        observer.on_note("checking data and models")
    resolved = prepare(work.config, work.layout, work.space, supervisor, stops)
    if resolved is None:
        return stops.why or End.STOPPED
    _check_data_unchanged(work.state, resolved, work.layout)
    if resolved != work.state.resolved:
        _tell(observers, work.ledger.append(Resolved(result=resolved)), work.state)
    context = StudyContext(
        config=work.config,
        layout=work.layout,
        space=work.space,
        ledger=work.ledger,
        state=work.state,
        resolved=resolved,
        total=work.config.study.trials,
        cores=available_cores(),
    )
    return StudyLoop(context, supervisor, stops, observers).run()


def _tell(observers: Sequence[Observer], event: Event, state: StudyState) -> None:
    for observer in observers:
        observer.on_event(event, state)


def _created(config: StudyConfig, space: Space) -> StudyCreated:
    return StudyCreated(
        id=uuid.uuid4().hex,
        name=config.study.name,
        task=config.study.task,
        metric=config.study.metric,
        direction=config.study.resolved_direction,
        seed=config.study.seed,
        space=space.to_json(),
    )


def _check_folder(config: StudyConfig, layout: StudyLayout, space: Space) -> tuple[str, ...]:
    """Refuse a configuration that would make the folder's results incomparable; say what else has changed.

    A study that holds no trial yet has nothing to protect: its ledger starts anew.
    """
    before = StudyState()
    for event in read_ledger(layout.ledger):
        before.apply(event)
    if before.created is None or not before.trials:
        for path in (layout.ledger, layout.journal):
            path.unlink(missing_ok=True)
        return ()
    check_resumable(load_study_file(layout.frozen_file).config, config)
    return compare(Space.from_json(before.created.space), space).sentences


def _check_data_unchanged(state: StudyState, resolved: ResolveResult, layout: StudyLayout) -> None:
    before = state.resolved
    if before is None or not state.trials or before.data_fingerprint == resolved.data_fingerprint:
        return
    raise StudyMismatchError(
        f"resuming the study in {layout.folder}",
        f"the data has changed: fingerprint {resolved.data_fingerprint}, the study began with "
        f"{before.data_fingerprint}",
        hint="put the old files back, or start a new study folder: results on other data cannot be compared",
    )


def _supervisor_settings(config: StudyConfig, layout: StudyLayout, marker: str) -> SupervisorSettings:
    layout.logs.mkdir(exist_ok=True)
    return SupervisorSettings(
        marker=marker,
        doorbell=layout.doorbell,
        isolation=config.runtime.isolation,
        server_log=layout.logs / "forkserver.txt",
    )


@dataclass(frozen=True, slots=True)
class MirrorKeeper:
    """Looks after the mirror whenever the ledger has grown."""

    mirror: MirrorProcess

    def on_event(self, event: Event, state: StudyState) -> None:
        """Start the mirror again where it died."""
        self.mirror.keep_alive()

    def on_message(self, number: int, message: Message) -> None:
        """Nothing to mirror."""

    def on_note(self, text: str) -> None:
        """Nothing to mirror."""


@contextmanager
def _mirror(config: StudyConfig, layout: StudyLayout, state: StudyState) -> Generator[list[Observer], None, None]:
    """Run the Optuna mirror beside the study; nothing here can delay or fail a trial.

    Yields:
        The observer that starts it again where it died.
    """
    target = config.search.mirror
    if target == "none" or state.created is None:
        yield []
        return
    storage = f"journal:{layout.journal}" if target == "journal" else target
    mirror = MirrorProcess(
        layout.ledger,
        storage=storage,
        study=state.created.name,
        direction=state.created.direction,
        status=layout.logs / "mirror.json",
        log=layout.logs / "mirror.txt",
    )
    mirror.start()
    try:
        yield [MirrorKeeper(mirror)]
        mirror.flush(_MIRROR_FLUSH_S)
    finally:
        mirror.stop()
