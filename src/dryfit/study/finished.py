"""Whether a study is done, told from its files alone: nothing is started for one that another run would not change."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from dryfit.config.freeze import dump_toml
from dryfit.config.schema import StudyConfig
from dryfit.core.settings import HUB_PREFIX
from dryfit.search.mirror import mirrored_bytes
from dryfit.store.layout import StudyLayout
from dryfit.study.machine import End
from dryfit.study.session import SessionResult, read_study


def finished(config: StudyConfig, layout: StudyLayout) -> SessionResult | None:
    """A study that is done, as it is; None where there may be something to do.

    Its last session must have come to the study's own end with the very configuration of now, its rows must not have
    been touched since that session began, and its mirror must have all of the ledger. Rows on the hub may have changed
    without a trace on this machine.

    Raises:
        LedgerError: The ledger cannot be read.
    """
    if not layout.ledger.is_file() or not _as_frozen(config, layout):
        return None
    state = read_study(layout)
    last = state.sessions[-1] if state.sessions else None
    if last is None or last.closed is None or not End(last.closed).is_final:
        return None
    if not _untouched(config, last.opened_at_s):
        return None
    if config.search.mirror != "none" and mirrored_bytes(layout.mirror_status) < layout.ledger.stat().st_size:
        return None
    return SessionResult(End(last.closed), state, layout)


def _as_frozen(config: StudyConfig, layout: StudyLayout) -> bool:
    try:
        return layout.frozen_file.read_text(encoding="utf-8") == dump_toml(config, layout.folder)
    except FileNotFoundError:
        return False


def _untouched(config: StudyConfig, since_s: float) -> bool:
    """Whether no file of rows was changed, or put in the place of another, since a moment (Unix seconds)."""
    for source in _texts(config.data.model_dump()) if config.objective is None else ():
        if source.startswith(HUB_PREFIX):
            return False
        file = Path(source)
        if not file.is_absolute():
            continue  # a name of a column or a language: sources are absolute once they are read
        try:
            # The change of the inode: a file that is moved here, or copied with its times, is an old one by its mtime.
            touched_s = file.stat().st_ctime if file.is_file() else since_s
        except OSError:
            return False
        if touched_s >= since_s:
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
