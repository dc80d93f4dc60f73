"""Optuna: a study for each generation of the ledger; a kill between two writes leaves nothing to repair."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from math import isnan
from pathlib import Path
from typing import Any, Final

from optuna.distributions import BaseDistribution, check_distribution_compatibility, json_to_distribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from dryfit.ledger.state import GenerationState, TrialState
from dryfit.search.follower_runs import Runs, RunWriter, parse_event, user_attributes
from dryfit.search.followers import JOURNAL_PREFIX
from dryfit.settings.errors import ConfigError
from dryfit.settings.text import LineTail
from dryfit.settings.trial import Outcome

_LEDGER_ATTR = "dryfit_ledger"
_LOCK_GRACE_S = 5
"""A killed mirror may leave the journal's lock behind. Every holder writes one line, so 5 s mean it is gone."""
_SQLITE_PREFIX = "sqlite:///"
_SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")

_STATES: Final = {
    None: OptunaState.RUNNING,
    Outcome.COMPLETE: OptunaState.COMPLETE,
    Outcome.PRUNED: OptunaState.PRUNED,
    Outcome.REFUSED: OptunaState.PRUNED,
    Outcome.FAILED: OptunaState.FAIL,
    Outcome.CANCELLED: OptunaState.FAIL,
}


def open_storage(where: str) -> tuple[BaseStorage, str]:
    """Open ``journal:PATH`` or a storage URL.

    A torn or corrupt journal makes Optuna fail for good: the next free ``PATH.2``, ``PATH.3``, ... is taken instead,
    and the ledger is replayed into it.

    Returns:
        The storage, and the journal's path (empty for a URL, which may hold a password).
    """
    if not where.startswith(JOURNAL_PREFIX):
        # A connection of before may be gone with the server: each is looked at before it is used.
        return get_storage(RDBStorage(where, engine_kwargs={"pool_pre_ping": True})), ""
    first = Path(where.removeprefix(JOURNAL_PREFIX))
    generation = 1
    path = first
    while not _readable(path):
        generation += 1
        path = first.with_name(f"{first.name}.{generation}")
    if path != first:
        print(f"an earlier journal is torn or corrupt: writing {path.name}", flush=True)
    lock = JournalFileSymlinkLock(str(path), grace_period=_LOCK_GRACE_S)
    return JournalStorage(JournalFileBackend(str(path), lock)), str(path)


def _readable(path: Path) -> bool:
    """Whether Optuna can read a journal and append to it; a file that is not there yet can be."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                return False
            if not line.endswith(b"\n") or not isinstance(record, dict) or "op_code" not in record:
                return False
    try:
        JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return False  # whole lines that make no sense to Optuna
    return True


class OptunaTrials(RunWriter):
    """Writes runs as trials of an Optuna storage; a generation without a trial is not there yet.

    Args:
        storage: Where to write.
        first_line: The first line of the ledger, which tells it from others: a study of the same name made from
            another ledger is left alone, and ``name-2``, ``name-3``, ... is taken.
    """

    def __init__(self, storage: BaseStorage, first_line: bytes) -> None:
        self._storage = storage
        self._ledger_id = hashlib.sha256(first_line).hexdigest()[:16]
        self._studies: dict[int, _OptunaStudy] = {}

    def identity(self) -> str:
        """Nothing: the storage itself has what tells it from others."""
        return ""

    def write(self, runs: Runs, numbers: list[int]) -> None:
        """Write what the storage lacks of these trials."""
        for number in numbers:
            at = runs.runs[number].trial.generation
            generation = runs.state.generations[at - 1]
            if at not in self._studies:
                self._studies[at] = _OptunaStudy(self._storage, generation, self._ledger_id)
            self._studies[at].update(runs, number - generation.first)


class _OptunaStudy:
    """One generation of a study in one storage."""

    def __init__(self, storage: BaseStorage, generation: GenerationState, ledger_id: str) -> None:
        self._storage = storage
        self._directions = [StudyDirection[goal.direction.name] for goal in generation.comparability.goals]
        self._study_id = self._own_study(generation.name, ledger_id)
        facts = {"generation": generation.number, "reasons": [*generation.reasons], "told": [*generation.reused]}
        known = storage.get_study_user_attrs(self._study_id)
        for key, fact in facts.items() if generation.number > 1 else ():
            if known.get(key) != fact:
                storage.set_study_user_attr(self._study_id, key, fact)
        self._known = storage.get_all_trials(self._study_id, deepcopy=False)
        self._first = generation.first
        self._drawn: list[dict[str, tuple[Any, BaseDistribution]]] = []
        self._kinds: dict[str, list[BaseDistribution]] = {}

    def _own_study(self, name: str, ledger_id: str) -> int:
        candidate, count = name, 1
        while True:
            try:
                study_id = self._storage.get_study_id_from_name(candidate)
            except KeyError:
                study_id = self._storage.create_new_study(self._directions, candidate)
            owner = self._storage.get_study_user_attrs(study_id).get(_LEDGER_ATTR)
            empty = not self._storage.get_all_trials(study_id, deepcopy=False)
            if owner == ledger_id:
                return study_id
            if owner is None and empty:  # new, or killed before this write
                self._storage.set_study_user_attr(study_id, _LEDGER_ATTR, ledger_id)
                return study_id
            count += 1
            candidate = f"{name}-{count}"
            print(f"the storage has a study of that name from elsewhere: trying {candidate}", flush=True)

    def update(self, runs: Runs, number: int) -> None:
        """Write what the storage lacks of trial ``number`` of this generation; the state comes last."""
        for missing in range(len(self._known), number + 1):  # Optuna numbers trials itself, in order
            trial_id = self._storage.create_new_trial(self._study_id, self._wanted(runs, missing))
            made = self._storage.get_trial(trial_id)
            assert made.number == missing, "another process writes trials into the mirror's study"
            self._known.append(made)
        if not self._known[number].state.is_finished():
            self._update(number, self._wanted(runs, number))

    def _update(self, number: int, wanted: FrozenTrial) -> None:
        storage, known = self._storage, self._known[number]
        trial_id = storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        for step, value in wanted.intermediate_values.items():
            if not _same(known.intermediate_values.get(step), value):
                storage.set_trial_intermediate_value(trial_id, step, value)
        for key, attr in wanted.user_attrs.items():
            if known.user_attrs.get(key) != attr:
                storage.set_trial_user_attr(trial_id, key, attr)
        for key, attr in wanted.system_attrs.items():
            if known.system_attrs.get(key) != attr:
                storage.set_trial_system_attr(trial_id, key, attr)
        if wanted.state.is_finished():
            storage.set_trial_state_values(trial_id, wanted.state, wanted.values)
        self._known[number] = storage.get_trial(trial_id)

    def _wanted(self, runs: Runs, number: int) -> FrozenTrial:
        """Return trial ``number`` of this generation as Optuna should have it."""
        trial = runs.runs[self._first + number].trial
        for earlier in range(self._first + len(self._drawn), trial.number + 1):
            self._drawn.append(self._named(runs.runs[earlier].trial))
        drawn, state, values = self._drawn[number], _STATES[trial.outcome], _values(trial, len(self._directions))
        if state is OptunaState.COMPLETE and values is None:  # Optuna has no complete trial without numbers
            state = OptunaState.FAIL
        ended_s = trial.finished_at_s
        return FrozenTrial(
            number=-1,
            trial_id=-1,
            state=state,
            value=None,
            values=values,
            datetime_start=datetime.fromtimestamp(trial.asked_at_s),
            datetime_complete=None if ended_s is None else datetime.fromtimestamp(ended_s),
            params={name: value for name, (value, _) in drawn.items()},
            distributions={name: distribution for name, (_, distribution) in drawn.items()},
            user_attrs=user_attributes(trial),
            system_attrs={**trial.system_attrs},
            intermediate_values={point.n: point.value for point in trial.reports},
        )

    def _named(self, trial: TrialState) -> dict[str, tuple[Any, BaseDistribution]]:
        """Return a trial's values and distributions by their names in the mirror.

        Optuna allows one name one set of choices in a study: where choices were added, or a scale changed, meanwhile,
        the name is ``name~2``, ``name~3``, ...
        """
        drawn: dict[str, tuple[Any, BaseDistribution]] = {}
        for internal, value in trial.internal.items():
            distribution = json_to_distribution(trial.distributions[internal])
            kinds = self._kinds.setdefault(internal, [])
            index = next((at for at, kind in enumerate(kinds) if _compatible(kind, distribution)), len(kinds))
            if index == len(kinds):
                kinds.append(distribution)
            drawn[internal if index == 0 else f"{internal}~{index + 1}"] = (value, distribution)
        return drawn


def _values(trial: TrialState, goals: int) -> list[float] | None:
    """Return one number for each goal; None where the trial does not have them all, or failed."""
    values = (trial.value, *trial.also)
    if trial.outcome is Outcome.PRUNED and trial.reports:
        values = (trial.reports[-1].value,)  # as optuna.Study.tell does; reports are of the first goal alone
    numbers = [value for value in values if value is not None and not isnan(value)]
    ended_well = _STATES[trial.outcome] in (OptunaState.COMPLETE, OptunaState.PRUNED)
    return numbers if ended_well and len(numbers) == goals else None


def _compatible(first: BaseDistribution, second: BaseDistribution) -> bool:
    try:
        check_distribution_compatibility(first, second)
    except ValueError:
        return False
    return True


def _same(known: float | None, wanted: float) -> bool:
    return known == wanted or (known is not None and isnan(known) and isnan(wanted))


def storage_file(target: str) -> Path:
    """Return the file meant by a path or a SQLite URL.

    Raises:
        ConfigError: It is the URL of another kind of storage.
    """
    if "://" in target and not target.startswith(_SQLITE_PREFIX):
        raise ConfigError(
            "exporting to Optuna",
            f"{target.partition('://')[0]}:// is no file",
            f"a path, or {_SQLITE_PREFIX}PATH",
            "a running study mirrors itself into any Optuna storage: see search.mirror",
        )
    return Path(target.removeprefix(_SQLITE_PREFIX))


def export_ledger(ledger: Path, file: Path, *, sqlite: bool) -> None:
    """Write all trials of a ledger into a new storage, as the mirror has them; the file appears when it is complete.

    Args:
        ledger: The ledger.
        file: What to write; its folder exists.
        sqlite: A SQLite database instead of a journal.
    """
    lines, runs = list(LineTail(ledger).read()), Runs()
    for event in map(parse_event, lines):
        if event is not None:
            runs.apply(event)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent))
        made = Path(folder) / file.name
        stack.enter_context(_unlogged())
        storage = RDBStorage(f"{_SQLITE_PREFIX}{made}") if sqlite else JournalStorage(JournalFileBackend(str(made)))
        OptunaTrials(storage, lines[0]).write(runs, list(range(len(runs.runs))))
        if isinstance(storage, RDBStorage):
            storage.engine.dispose()
        made.replace(file)


@contextmanager
def _unlogged() -> Generator[None, None, None]:
    """Drop the line with which Optuna greets each new study; its loggers stay as the user set them."""

    def dropped(record: logging.LogRecord) -> bool:
        return False

    loggers = [logging.getLogger(storage.__module__) for storage in (RDBStorage, JournalStorage)]
    for logger in loggers:
        logger.addFilter(dropped)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(dropped)


def is_sqlite(target: str) -> bool:
    """Whether a path or URL means a SQLite database."""
    return target.startswith(_SQLITE_PREFIX) or target.endswith(_SQLITE_SUFFIXES)
