"""Check a machine and a study without running a trial, and write the archive of a bug report."""

import io
import json
import os
import platform
import re
import stat
import time
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from dryfit.documents.findings import BugReport, PartView
from dryfit.ledger.folder import StudyLayout
from dryfit.processes.launch import launch_text
from dryfit.settings.devices import parse_device
from dryfit.settings.errors import ConfigError, DryfitError
from dryfit.settings.files import reading, write_bytes_atomic, writing
from dryfit.settings.installed import version_lines
from dryfit.settings.run_costs import given_price
from dryfit.settings.secrets import Shareable, shareable
from dryfit.settings.study_file_reading import load_study_file
from dryfit.study.arguments import layout_of, space_of, study_file_of
from dryfit.study.doctor import CheckedStudy, examine
from dryfit.study.machine_checks import Diagnosis, Finding, failed, failed_by, passed
from dryfit.study.rehearsals import demand_cuda
from dryfit.study.study_checks import ABOUT

# What a report on a bug holds: gathered from a study's folder, which may be broken in any way, and made shareable.


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


def doctor(
    study_file: Path | str | None = None,
    *,
    overrides: Sequence[str] = (),
    folder: Path | str | None = None,
    machine: bool = True,
    device: str | None = None,
    price: str | float | None = None,
    on_finding: Callable[[Finding], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Check this machine, and a study: rows, batches, models, disk and memory. No trial is run, no ledger written.

    Args:
        study_file: A study file, or its folder; None: the machine alone.
        overrides: ``key=value`` pairs that replace keys of the file.
        folder: Where the study lives, as in :func:`dryfit.tune`.
        machine: Whether the machine is checked beside the study.
        device: That a step of the user's own code is rehearsed for: a card's name or a size; None: this machine's.
        price: Of the device an hour, today: ``1.80`` or ``"1.80USD"``; None: no cost is told.
        on_finding: Called with each check as it ends.
        on_note: Called with a line about what is being done.

    Returns:
        Everything that was checked. What is wrong with a study file is a finding, not an error.

    Raises:
        ConfigError: There is no such file or device, or the price is none.
    """
    spec = None if device is None else demand_cuda(parse_device(device))
    prices = None if price is None else given_price(str(price), date.today())
    findings: list[Finding] = []
    checked = partial(CheckedStudy, device=spec, prices=prices)
    for finding in _all_findings(study_file, overrides, folder, on_note, checked, machine=machine):
        findings.append(finding)
        on_finding(finding)
    return Diagnosis(tuple(findings))


def submitted_text(study_file: Path | str, *, overrides: Sequence[str] = (), folder: Path | str | None = None) -> str:
    """Return the command with which :func:`dryfit.tune` would start agents.

    Args:
        study_file: A study file, or its folder.
        overrides: ``key=value`` pairs that replace keys of the file.
        folder: Where the study lives, as in :func:`dryfit.tune`.

    Returns:
        A command with its input; empty where nothing is submitted, or the file cannot be read, as :func:`doctor` says.
    """
    try:
        path = study_file_of(Path(study_file))
        wish = load_study_file(path, overrides).config.nodes
        layout = StudyLayout(Path(folder).resolve()) if folder is not None else layout_of(path)
        return launch_text(wish, layout) if wish is not None else ""
    except ConfigError:
        return ""


def with_nodes(overrides: Sequence[str], launch: str | None, sbatch: str | None) -> tuple[str, ...]:
    """Return overrides with ``nodes.launch`` and ``nodes.sbatch`` added where they are given."""
    given = {"nodes.launch": launch, "nodes.sbatch": sbatch}
    return (*overrides, *(f"{key}={json.dumps(text)}" for key, text in given.items() if text is not None))


def _all_findings(
    study_file: Path | str | None,
    overrides: Sequence[str],
    folder: Path | str | None,
    on_note: Callable[[str], None],
    checked: Callable[..., CheckedStudy],
    *,
    machine: bool,
) -> Iterator[Finding]:
    if study_file is None:
        yield from examine(None, machine=machine, on_note=on_note)
        return
    path = study_file_of(Path(study_file))
    try:
        loaded = load_study_file(path, overrides)
        space = space_of(loaded)
    except ConfigError as error:
        yield failed_by(ABOUT, "file", error)
        if machine:
            yield from examine(None, machine=True, on_note=on_note)
        return
    yield passed(ABOUT, "file", str(path))
    layout = StudyLayout(Path(folder).resolve()) if folder is not None else layout_of(path)
    yield from examine(checked(loaded.config, space, layout), machine=machine, on_note=on_note)


def bug_report(
    study: Path | str | None = None,
    out: Path | str | None = None,
    *,
    on_note: Callable[[str], None] = lambda _: None,
) -> BugReport:
    """Write an archive to attach to a report on a bug: versions, findings, settings, last events, ends of logs.

    It has no row, no weight and no text of the user's: of strings only names and messages of known shape stay, of all
    others the length. Secrets and paths of the home folder are left out; no symbolic link is followed.

    Args:
        study: A study's folder, or its study file, in any state; None: of the machine alone.
        out: The archive to write; by default ``dryfit-bug-report-TIME.zip`` in the current folder. It must be new.
        on_note: Called with a line about what is being done.

    Raises:
        ConfigError: There is no such folder; or the archive is already there, or its folder is not.
        MachineError: It cannot be written.
    """
    layout = layout_of(study) if study is not None else None
    if layout is not None and not layout.folder.is_dir():
        raise ConfigError(f"reporting a bug of the study in {layout.folder}", "there is no such folder")
    name = f"dryfit-bug-report-{time.strftime('%Y%m%d-%H%M%S')}.zip"
    target = Path(name if out is None else out).expanduser().absolute()
    if target.exists() or target.is_symlink():
        raise ConfigError(f"writing {target}", "there is such a file", "a new one")
    share = shareable(
        os.environ,
        Path.home(),
        platform.node(),
        folder=layout.folder if layout is not None else None,
        own_code=layout is not None and _runs_own_code(layout),
    )
    parts = tuple(gather(layout, share, os.environ, lambda: _shareable_findings(layout, share, on_note)))
    on_note("writing the archive")
    with writing(target, own=False):
        write_archive(target, parts)
    listed = tuple(PartView(name=part.name, bytes=len(part.text.encode()), about=part.about) for part in parts)
    return BugReport(file=str(target), parts=listed)


def _last_settings(layout: StudyLayout) -> Path:
    return layout.frozen_file if layout.frozen_file.is_file() else layout.study_file


def _runs_own_code(layout: StudyLayout) -> bool:
    """Whether code of the user's runs in a study's processes, as far as its settings say; True where they do not."""
    try:
        config = load_study_file(_last_settings(layout)).config
    except (DryfitError, OSError):
        return True
    named = ":" in config.study.task or (config.lm.metric is not None and ":" in config.lm.metric)
    return named or config.function is not None or bool(config.study.listeners) or config.model.trust_remote_code


def _shareable_findings(
    layout: StudyLayout | None, share: Shareable, on_note: Callable[[str], None]
) -> list[dict[str, str]]:
    """Examine the machine, and the file, folder and ledger of a study; no row is read."""
    findings: list[Finding] = []
    checked = None
    if layout is not None:
        try:
            loaded = load_study_file(_last_settings(layout))
            checked = CheckedStudy(loaded.config, space_of(loaded), layout)
        except DryfitError as error:
            findings.append(failed_by(ABOUT, "file", error))
        except OSError as error:
            findings.append(failed(ABOUT, "file", str(error), "make it readable"))
    try:
        findings.extend(examine(checked, machine=True, on_note=on_note, rows=False))
    except (DryfitError, OSError) as error:
        findings.append(failed("machine", "checks", f"{type(error).__name__}: {error}", "see the other parts"))
    return [
        {
            "about": finding.about,
            "check": finding.check,
            "status": finding.status,
            "found": share.sentence(finding.found),
            "fix": share.sentence(finding.fix),
        }
        for finding in findings
    ]
