"""What ``doctor``, ``bug-report`` and ``load --check`` found, as lines, tables and JSON."""

from collections.abc import Iterable, Iterator

from pydantic import Field

from dryfit.documents.document import Answer, Document, Line, View, document_of, json_of
from dryfit.settings.check_messages import Adapter, Built, Health, Stored, Subject
from dryfit.settings.text import Table, few
from dryfit.study.machine_checks import Diagnosis, Finding, Status


class PartView(View):
    """One file of a report on a bug."""

    name: str
    bytes: int
    about: str


class BugReport(Answer):
    """What ``dryfit bug-report --json`` prints."""

    file: str = Field(description="the archive")
    parts: tuple[PartView, ...] = Field(description="what is inside")


@document_of.register
def _(report: BugReport) -> Document:
    rows = tuple((part.name, str(part.bytes), part.about) for part in report.parts)
    warning = "read it before you give it away: your own code may write texts that look like messages"
    return Document((Table(("inside", "bytes", "what it is"), rows), report.file, Line(warning, aside=True)))


@json_of.register
def _(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "schema": 1,
        "healthy": diagnosis.healthy,
        "counts": diagnosis.counts,
        "checks": diagnosis.findings,
    }


def finding_lines(finding: Finding) -> Iterator[str]:
    """Yield a check as one line for ``grep FAIL``, and a second line with the fix unless it passed."""
    result = " ".join(finding.found.split())
    yield f"{finding.status.upper():4}  {finding.about}: {finding.check}: {result}"
    if finding.status is not Status.PASS:
        yield f"      fix: {' '.join(finding.fix.split())}"


def verdict_document(diagnosis: Diagnosis) -> Document:
    """Return the verdict on all checks with their counts; each was printed as it ended."""
    counts = diagnosis.counts
    text = f"{counts[Status.PASS]} passed, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed"
    word, style = ("ready", "green") if diagnosis.healthy else ("not ready", "red")
    return Document((Line(f"{word}: {text}", style),))


_LINES_MAX = 12
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SUBJECTS = {
    Subject.MODEL: "a model",
    Subject.TRAINED: "an encoder with its head, saved by a trial",
    Subject.ADAPTER: "a PEFT adapter, without its base model",
    Subject.ENSEMBLE: "an ensemble: several models saved by trials",
}


def size_text(size_bytes: int) -> str:
    """Format a size in decimal units."""
    unit = next(((most, name) for most, name in _UNITS if size_bytes >= most), None)
    return f"{size_bytes / unit[0]:.3g} {unit[1]}" if unit is not None else f"{size_bytes} B"


def health_table(health: Health) -> Table:
    """Return one row for each fact about a checkpoint."""
    return Table(("what", "found"), tuple(_rows(health)))


def health_verdict(health: Health) -> str:
    """Say in one line whether a checkpoint is healthy, or why not."""
    if health.healthy and health.subject is Subject.ADAPTER:
        return "healthy: its pairs are complete; whether its base model fits is seen when it is attached"
    if health.healthy:
        task = f', task="{health.task}"' if health.task else ""
        return f'healthy: dryfit.load("{health.folder}"{task}) can load it, as far as headers tell'
    faults = [f"{len(names)} {what}" for what, names in health.faults()]
    if health.errors:
        faults.append("it cannot be opened" if health.stored is None and not health.members else "see the error above")
    return f"not healthy: {', '.join(faults)}"


@document_of.register
def _(health: Health) -> Document:
    """Return what a checkpoint holds, and the verdict as the last line."""
    verdict = Line(health_verdict(health), "green" if health.healthy else "red")
    return Document((health_table(health), *health.errors, verdict))


def _rows(health: Health) -> Iterator[tuple[str, str]]:
    yield "folder", health.folder
    yield "holds", _SUBJECTS[health.subject]
    if health.task:
        yield "task", f"{health.task} ({health.why})"
    if health.stored is not None:
        yield from _stored_rows(health.stored)
    if health.adapter is not None:
        yield from _adapter_rows(health.adapter)
    if health.model is not None:
        yield from _model_rows(health.model)
    for place, member in enumerate(health.members, start=1):
        yield f"member {place}", health_verdict(member)
    for what, names in health.faults():
        yield from _listed((what, name) for name in names)
    for what, names in (("not used", health.unexpected), ("ignored", health.ignored)):
        if names:
            yield what, f"{len(names)}: {few(names)}"
    yield from (("note", note) for note in health.notes)


def _stored_rows(stored: Stored) -> Iterator[tuple[str, str]]:
    kinds = ", ".join(f"{size_text(size)} in {dtype}" for dtype, size in stored.bytes_by_dtype.items())
    yield "weights", f"{stored.tensors} tensors, {size_text(stored.total_bytes)} ({kinds}), {stored.format}"
    what = "file" if len(stored.files) == 1 else "shard"
    yield from _listed(
        (what, f"{file.name}: {size_text(file.size_bytes)}, {file.tensors} tensors") for file in stored.files
    )


def _listed(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the first rows, and one that counts the rest."""
    every = list(rows)
    yield from every[:_LINES_MAX]
    if len(every) > _LINES_MAX:
        yield every[0][0], f"and {len(every) - _LINES_MAX} more"


def _model_rows(model: Built) -> Iterator[tuple[str, str]]:
    yield "model", f"{model.architecture}, {model.parameters:,} parameters"
    yield "filled", f"{model.filled} of {model.places} tensors"
    if model.renamed:
        yield "names undone", ", ".join(f"{count} x {part}" for part, count in model.renamed.items())
    for names in model.tied:
        yield "tied", " = ".join(names)
    if model.conversions:
        yield "converted", f"{len(model.conversions)}: {few(model.conversions, most=3)}"


def _adapter_rows(adapter: Adapter) -> Iterator[tuple[str, str]]:
    rank = f", rank {adapter.rank}" if adapter.rank is not None else ""
    yield "adapter", f"{adapter.kind}{rank}, {adapter.layers} layers"
    yield "base model", adapter.base or "not named"
