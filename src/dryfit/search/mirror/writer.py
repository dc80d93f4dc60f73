"""Write mirrored trials into an Optuna storage, so that a kill between two writes leaves nothing to repair."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from math import isnan
from pathlib import Path

from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from dryfit.core.settings.choices import Direction
from dryfit.search.mirror.handle import JOURNAL_PREFIX
from dryfit.search.mirror.model import MirroredStudy, MirroredTrial, MirrorModel, parse_event

_LEDGER_ATTR = "dryfit_ledger"
_LOCK_GRACE_S = 5
"""A killed mirror may leave the journal's lock behind. Every holder writes one line, so 5 s mean it is gone."""


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


class MirrorStores:
    """All generations of a ledger in one storage; a generation without a trial is not there yet.

    Args:
        storage: Where to write.
        study: Name of the study.
        first_line: The first line of the ledger, which tells it from others; see :class:`MirrorStore`.
    """

    def __init__(self, storage: BaseStorage, study: str, *, first_line: bytes) -> None:
        self._storage = storage
        self._study = study
        self._ledger_id = hashlib.sha256(first_line).hexdigest()[:16]
        self._model = MirrorModel()
        self._stores: dict[int, MirrorStore] = {}

    def add(self, lines: Iterable[bytes]) -> None:
        """Write what further lines of the ledger say."""
        events = [event for line in lines if (event := parse_event(line)) is not None]
        changed = {place for event in events if (place := self._model.apply(event)) is not None}
        for at, number in sorted(changed):
            if at not in self._stores:
                self._stores[at] = MirrorStore(
                    self._storage, self._study, wanted=self._model.studies[at], ledger_id=self._ledger_id
                )
            self._stores[at].update(number)


class MirrorStore:
    """One generation of a study in one storage.

    Args:
        storage: Where to write.
        study: Name of the study.
        wanted: How the generation should look.
        ledger_id: Tells this ledger from others. A study of that name made from another ledger is left alone, and
            ``name-2``, ``name-3``, ... is taken.
    """

    def __init__(self, storage: BaseStorage, study: str, *, wanted: MirroredStudy, ledger_id: str) -> None:
        self._storage = storage
        self._wanted = wanted
        self._study_id = self._own_study(f"{study}{wanted.suffix}", wanted.directions, ledger_id)
        known = storage.get_study_user_attrs(self._study_id)
        for key, attr in wanted.user_attrs.items():
            if known.get(key) != attr:
                storage.set_study_user_attr(self._study_id, key, attr)
        self._known = {trial.number: trial for trial in storage.get_all_trials(self._study_id, deepcopy=False)}

    def _own_study(self, name: str, directions: Sequence[Direction], ledger_id: str) -> int:
        candidate, count = name, 1
        while True:
            try:
                study_id = self._storage.get_study_id_from_name(candidate)
            except KeyError:
                wanted = [StudyDirection[direction.name] for direction in directions]
                study_id = self._storage.create_new_study(wanted, candidate)
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

    def update(self, number: int) -> None:
        """Write what the storage lacks of trial ``number`` of this generation; the state comes last."""
        for missing in range(len(self._known), number + 1):  # Optuna numbers trials itself, in order
            self._create(missing, self._wanted.trials[missing])
        known = self._known[number]
        if not known.state.is_finished():
            self._update(number, known, self._wanted.trials[number])

    def _create(self, number: int, wanted: MirroredTrial) -> None:
        trial_id = self._storage.create_new_trial(self._study_id, _template(wanted))
        trial = self._storage.get_trial(trial_id)
        assert trial.number == number, "another process writes trials into the mirror's study"
        self._remember(trial)

    def _update(self, number: int, known: FrozenTrial, wanted: MirroredTrial) -> None:
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        for step, value in wanted.reports.items():
            if not _same(known.intermediate_values.get(step), value):
                self._storage.set_trial_intermediate_value(trial_id, step, value)
        for key, attr in wanted.user_attrs.items():
            if known.user_attrs.get(key) != attr:
                self._storage.set_trial_user_attr(trial_id, key, attr)
        for key, attr in wanted.system_attrs.items():
            if known.system_attrs.get(key) != attr:
                self._storage.set_trial_system_attr(trial_id, key, attr)
        if wanted.state.is_finished():
            self._storage.set_trial_state_values(trial_id, wanted.state, wanted.values)
        self._remember(self._storage.get_trial(trial_id))

    def _remember(self, trial: FrozenTrial) -> None:
        self._known[trial.number] = trial


def _template(wanted: MirroredTrial) -> FrozenTrial:
    """Return the whole trial, for a single write."""
    return FrozenTrial(
        number=-1,
        trial_id=-1,
        state=wanted.state,
        value=None,
        values=wanted.values,
        datetime_start=wanted.started,
        datetime_complete=wanted.ended,
        params=wanted.params,
        distributions=wanted.distributions,
        user_attrs=wanted.user_attrs,
        system_attrs={**wanted.system_attrs},
        intermediate_values=wanted.reports,
    )


def _same(known: float | None, wanted: float) -> bool:
    return known == wanted or (known is not None and isnan(known) and isnan(wanted))
