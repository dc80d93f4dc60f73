"""Check a machine and a study without running a trial, and write the archive of a bug report."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path

from dryfit.documents.findings import BugReport, PartView
from dryfit.ledger.folder import StudyLayout
from dryfit.processes.launch import launch_text
from dryfit.settings.devices import parse_device
from dryfit.settings.errors import ConfigError, DryfitError
from dryfit.settings.files import writing
from dryfit.settings.run_costs import given_price
from dryfit.settings.secrets import Shareable, shareable
from dryfit.settings.study_file_reading import load_study_file
from dryfit.study.arguments import layout_of, space_of, study_file_of
from dryfit.study.bug_report import gather, write_archive
from dryfit.study.doctor import CheckedStudy, examine
from dryfit.study.machine_checks import Diagnosis, Finding, failed, failed_by, passed
from dryfit.study.rehearsals import demand_cuda
from dryfit.study.study_checks import ABOUT


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
