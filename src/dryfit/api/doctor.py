"""Check a machine and a study without running a trial."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dryfit.api.files import layout_of, space_of, study_file_of
from dryfit.config.load import load_study_file
from dryfit.core.errors import ConfigError
from dryfit.store.layout import StudyLayout
from dryfit.study.doctor.examine import CheckedStudy, examine
from dryfit.study.doctor.finding import Diagnosis, Finding, failed_by, passed
from dryfit.study.doctor.study_checks import ABOUT


def doctor(
    study_file: Path | str | None = None,
    *,
    overrides: Sequence[str] = (),
    folder: Path | str | None = None,
    machine: bool = True,
    on_finding: Callable[[Finding], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Check this machine, and a study: rows, batches, models, disk and memory. No trial is run, no ledger written.

    Args:
        study_file: A study file, or its folder; None: the machine alone.
        overrides: ``key=value`` pairs that replace keys of the file.
        folder: Where the study lives, as in :func:`dryfit.tune`.
        machine: Whether the machine is checked beside the study.
        on_finding: Called with each check as it ends.
        on_note: Called with a line about what is being done.

    Returns:
        Everything that was checked. What is wrong with a study file is a finding, not an error.

    Raises:
        ConfigError: There is no such file.
    """
    findings: list[Finding] = []
    for finding in _findings(study_file, overrides, folder, on_note, machine=machine):
        findings.append(finding)
        on_finding(finding)
    return Diagnosis(tuple(findings))


def _findings(
    study_file: Path | str | None,
    overrides: Sequence[str],
    folder: Path | str | None,
    on_note: Callable[[str], None],
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
    yield from examine(CheckedStudy(loaded.config, space, layout), machine=machine, on_note=on_note)
