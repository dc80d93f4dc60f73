"""Attempts in a study's folder that its ledger does not know: the ledger is older than the folder."""

from collections.abc import Iterator
from pathlib import Path

from dryfit.core.errors import LedgerError
from dryfit.core.text.words import few
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState


def demand_known_attempts(state: StudyState, layout: StudyLayout) -> None:
    """Refuse to go on with a ledger that is older than the study's folder, as a copy that was put back is.

    An attempt's folder is made once its event is on disk, so one without an event tells that the ledger once went on.
    To go on would compute those trials again over their own files, from checkpoints ahead of their reports.

    Raises:
        LedgerError: It is older. The message says which trials it does not know all of, and what to do.
    """
    ahead = sorted(_ahead(state, layout))
    if not ahead:
        return
    kept = max(layout.folder.glob("ledger-kept-*.jsonl"), default=None)
    newer = "put the newer one back" + (f": mv {kept} {layout.ledger}" if kept is not None else "")
    raise LedgerError(
        f"opening the study in {layout.folder}",
        f"its ledger is older than its folder: it does not know all attempts in {few(map(str, ahead), 3)}",
        "the ledger that the study was last run with",
        f"{newer}; or move those trials' folders elsewhere, and they are computed again",
    )


def _ahead(state: StudyState, layout: StudyLayout) -> Iterator[Path]:
    """Yield the folder of each trial with an attempt that the ledger does not know."""
    for folder in layout.trials.glob("[0-9]*"):
        number = int(folder.name) if folder.name.isdecimal() else -1
        trial = state.trials[number] if 0 <= number < len(state.trials) else None
        if number < 0 or layout.trial(number).folder != folder or (trial is not None and trial.outcome is not None):
            continue
        known = len(trial.attempts) if trial is not None else 0
        if layout.trial(number).attempt(known + 1).exists():
            yield folder
