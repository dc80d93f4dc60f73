"""What a report on a bug holds: gathered from a study's folder, which may be broken in any way, and made shareable."""

import io
import json
import os
import re
import stat
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from dryfit.ledger.folder import StudyLayout
from dryfit.settings.errors import DryfitError
from dryfit.settings.files import reading, write_bytes_atomic
from dryfit.settings.installed import version_lines
from dryfit.settings.secrets import Shareable

MOST_EVENTS: Final = 200
"""Last events of the ledger that are shown."""
MOST_LOGS: Final = 12
"""Logs that are shown, those written last."""
MOST_LOG_BYTES: Final = 32_768
"""Of the end of a log."""
_MOST_LEDGER_BYTES: Final = 1 << 22
"""Of the end of the ledger."""
_MOST_SETTINGS_BYTES: Final = 1 << 20
_MOST_FILES: Final = 100_000
"""Files of the study's folder that are looked at for logs."""

_LOG: Final = re.compile(r"[\w./-]+/[a-z]+\.txt", re.ASCII)
"""A log's place in the study's folder."""

_TOLD: Final = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "PYTHONHASHSEED",
    "SLURM_JOB_ID",
    "LANG",
)
"""Variables that are shown; of all others not even the name."""


_ABOUT: Final = """\
A report on a bug of dryfit. It has no row, no weight and no text of a user's: <N characters> stands for each. Secrets,
the home folder, the name of the machine and of its user are left out. Read it before you give it away.

"""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a report.

    Attributes:
        name: Its name in the archive.
        about: What it holds, in words.
        text: What it holds.
    """

    name: str
    about: str
    text: str


def gather(
    layout: StudyLayout | None, share: Shareable, environment: Mapping[str, str], checks: Callable[[], object]
) -> Iterator[Part]:
    """Yield the parts of a report; an unreadable part contains its error.

    Args:
        layout: The study; None: the machine alone.
        share: Makes each text shareable.
        environment: The process's.
        checks: Examines the machine and the study; returns JSON. Its errors are told.
    """
    yield Part("versions.txt", "dryfit and what it stands on", _lines(map(share.sentence, version_lines())))
    told = {name: share.sentence(environment[name]) for name in _TOLD if name in environment}
    yield Part("environment.json", "variables that change how trials run", _json(told))
    yield Part("doctor.json", "what `dryfit doctor` finds, without reading a row", _tried(checks, share))
    if layout is None:
        return
    for file in (layout.study_file, layout.frozen_file):
        about = "the study file" if file == layout.study_file else "the settings of the last run"
        yield Part(f"{file.stem}.json", f"{about}, without texts", _tried(lambda at=file: _settings(at, share), share))
    yield Part(
        "ledger.json", "how long the ledger is, and its events by kind", _tried(lambda: _counts(layout, share), share)
    )
    yield Part("events.jsonl", f"its last {MOST_EVENTS} events at most", _events(layout, share))
    yield from _logs(layout, share)


def write_archive(file: Path, parts: Sequence[Part]) -> None:
    """Write the parts, and a list of them, into a zip archive."""
    listed = "".join(f"{part.name}: {part.about}\n" for part in parts)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, text in (("README.txt", _ABOUT + listed), *((part.name, part.text) for part in parts)):
            opened.writestr(name, text)
    write_bytes_atomic(file, archive.getvalue(), durable=False)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _json(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=False) + "\n"


def _tried(make: Callable[[], object], share: Shareable) -> str:
    """Return what a function makes as JSON; where it cannot, why."""
    try:
        return _json(make())
    except (DryfitError, OSError, ValueError, RecursionError) as error:
        return _json({"cannot_be_told": share.sentence(f"{type(error).__name__}: {error}")})


def _settings(file: Path, share: Shareable) -> object:
    with reading(file) as opened:
        data = opened.read(_MOST_SETTINGS_BYTES)
    return share.value(tomllib.loads(data.decode("utf-8")))


def _tail(file: Path, most_bytes: int) -> bytes:
    """Return the last whole lines of a file: half a line may have half a secret, which nothing recognises."""
    with reading(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        opened.seek(max(0, size - most_bytes))
        data = opened.read(most_bytes)
    return data if size <= most_bytes else data.partition(b"\n")[2]


def _counts(layout: StudyLayout, share: Shareable) -> dict[str, object]:
    """Return the size of the ledger, its events by type, and the lines that cannot be read."""
    data = _tail(layout.ledger, _MOST_LEDGER_BYTES)
    types: Counter[str] = Counter()
    unreadable: list[int] = []
    lines = data.splitlines()
    for number, line in enumerate(lines, start=1 - len(lines)):
        event = _event(line)
        if event is None:
            unreadable.append(number)
        else:
            types[str(share.value(event.get("type")))] += 1
    return {
        "bytes": layout.ledger.lstat().st_size,
        "bytes_read_from_its_end": len(data),
        "events_by_type": dict(types),
        "unreadable_lines_counted_back_from_the_last": unreadable[:MOST_EVENTS],
        "last_line_is_whole": data.endswith(b"\n"),
    }


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", event) if isinstance(event, dict) else None


def _events(layout: StudyLayout, share: Shareable) -> str:
    try:
        lines = _tail(layout.ledger, _MOST_LEDGER_BYTES).splitlines()[-MOST_EVENTS:]
    except (DryfitError, OSError) as error:
        return json.dumps({"cannot_be_told": share.sentence(str(error))}) + "\n"
    shown: list[str] = []
    for line in lines:
        event = _event(line)
        try:
            told = share.value(event) if event is not None else {"unreadable_bytes": len(line)}
        except RecursionError:
            told = {"unreadable_bytes": len(line)}
        shown.append(json.dumps(told))
    return "".join(f"{line}\n" for line in shown)


def _logs(layout: StudyLayout, share: Shareable) -> Iterator[Part]:
    """Yield the ends of the logs that were written last; links and special files are not opened."""
    found = sorted(_log_files(layout.folder), key=lambda item: item[0], reverse=True)[:MOST_LOGS]
    for _, file in found:
        try:
            text = share.log(_tail(file, MOST_LOG_BYTES).decode("utf-8", "replace"))
        except (DryfitError, OSError) as error:
            text = share.sentence(str(error))
        about = f"its last {MOST_LOG_BYTES // 1024} KiB at most, without lines of unknown shape"
        yield Part(f"study/{file.relative_to(layout.folder).as_posix()}", about, text + "\n")


def _log_files(folder: Path) -> Iterator[tuple[float, Path]]:
    """Yield the logs of a study with the times of their last change; no link is followed."""
    looked = 0
    for name in ("logs", "prepare", "trials", "final"):
        top = folder / name
        if top.is_symlink():
            continue
        for path, folders, files in os.walk(top):
            folders[:] = [one for one in folders if one not in ("checkpoints", "best", "model", "scored")]
            for file in files:
                looked += 1
                if looked > _MOST_FILES:
                    return
                at = Path(path, file)
                try:
                    status = at.lstat()
                except OSError:
                    continue
                if (
                    _LOG.fullmatch(at.relative_to(folder).as_posix())
                    and stat.S_ISREG(status.st_mode)
                    and status.st_size
                ):
                    yield status.st_mtime, at
