"""Whether a study is done, judged by its files alone, so that another run of it starts nothing."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, cast

from dryfit.config.freeze import dump_toml
from dryfit.config.schema import StudyConfig
from dryfit.core.regular_files import contents
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.tables import HUB_PREFIX
from dryfit.search.followers.keeper import followers_of
from dryfit.store.layout import StudyLayout
from dryfit.study.loop.next_step import End
from dryfit.study.loop.session import SessionResult, read_study
from dryfit.study.planning.pace import recorded_precision, with_precision

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
