"""Import ContractNLI: contracts, hypotheses about them, and the evidence spans that decide each.

Format: Koreeda and Manning, "ContractNLI" (Findings of EMNLP 2021), stanfordnlp.github.io/contract-nli:
``{"documents": [{"id", "text", "spans": [[start, end]], "annotation_sets": [{"annotations": {"nda-1": {"choice",
"spans": [index of a span]}}}]}], "labels": {"nda-1": {"short_description", "hypothesis"}}}``, where choice is
Entailment, Contradiction or NotMentioned, and only the last has no spans.

A contract is divided into passages, so that each span lies in one passage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, StrictInt, StrictStr

from dryfit.importers.files import whole
from dryfit.importers.items import (
    ImportedRow,
    Item,
    LeftOut,
    Rejected,
    Span,
    UnfitError,
    drawn,
    each,
    joined,
    read_as,
    trimmed,
)


def passages_of(text: str, spans: Sequence[Span], enough_chars: int) -> list[Span]:
    """Return the passages of a text, in order, without the white space at their ends.

    A passage ends before the first span at which it has enough characters, unless an earlier span reaches into that
    span. Text between two spans belongs to the passage before. So each span lies in one passage, and only white space
    in none; a passage is as long as its spans need it to be, and the last one may be short.

    Args:
        text: The text.
        spans: Spans such as sentences, in any order.
        enough_chars: The length from which a passage ends with the next span.
    """
    cuts = [0]
    reach = 0
    for start, end in sorted(spans):
        if start >= reach and start - cuts[-1] >= enough_chars:
            cuts.append(start)
        reach = max(reach, end)
    passages = [trimmed(text, (start, end)) for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [passage for passage in passages if passage is not None]


_NOT_MENTIONED = "NotMentioned"


class _File(BaseModel):
    documents: list[Any]
    labels: dict[StrictStr, Any]


class _Label(BaseModel):
    hypothesis: StrictStr


class _AnnotationSet(BaseModel):
    annotations: dict[StrictStr, Any]


class _Document(BaseModel):
    id: StrictInt | StrictStr
    text: StrictStr
    spans: list[tuple[StrictInt, StrictInt]]
    annotation_sets: list[_AnnotationSet]


class _Annotation(BaseModel):
    choice: Literal["Entailment", "Contradiction", "NotMentioned"]
    spans: list[StrictInt]


@dataclass(frozen=True, slots=True)
class PassageSettings:
    """How contracts become rows.

    Attributes:
        passage_chars: The length from which a passage ends with the next span.
        negatives: Rows with label 0 for each with label 1, of a contract and a hypothesis; None: all there are.
    """

    passage_chars: int
    negatives: int | None


@dataclass(frozen=True, slots=True)
class _Contract:
    """A contract, divided into passages."""

    name: str
    text: str
    spans: list[Span]
    passages: list[Span]
    path: str


def contractnli_rows(document: Any, source: str, cutting: PassageSettings) -> Iterator[Item]:
    """Yield a row for each hypothesis and passage: label 1 where the passage has evidence that decides the hypothesis.

    Args:
        document: The parsed file.
        source: Its name.
        cutting: How contracts become rows.

    Raises:
        DataError: It is not a ContractNLI file.
    """
    allowed = '{"documents": [contracts], "labels": {hypotheses}}'
    file = whole(_File, document, source, allowed, "squad")
    hypotheses: dict[str, str] = {}

    def label(key: str, raw: Any, _path: str) -> tuple[Item, ...]:
        hypotheses[key] = read_as(_Label, raw).hypothesis
        return ()

    yield from each(file.labels, f"{source}, labels", label)
    read = partial(_contract_rows, hypotheses, cutting, dict[str, str]())
    yield from each(file.documents, f"{source}, documents", read)


def _contract_rows(
    hypotheses: dict[str, str], cutting: PassageSettings, seen: dict[str, str], _number: int, raw: Any, path: str
) -> Iterator[Item]:
    document = read_as(_Document, raw)
    text, name = document.text, str(document.id)
    for index, (start, end) in enumerate(document.spans):
        if not 0 <= start <= end <= len(text):
            raise UnfitError(f"[{start}, {end}] is outside the text of {len(text)} characters", f".spans[{index}]")
    if not document.annotation_sets:
        raise UnfitError("there is none", ".annotation_sets")
    first = seen.setdefault(name, path)
    if first != path:
        raise UnfitError(f"id {name!r} is there already: {first}")
    for index in range(1, len(document.annotation_sets)):
        yield Rejected(f"{path}.annotation_sets[{index}]", "only the first set of a contract is read")
    contract = _Contract(name, text, document.spans, passages_of(text, document.spans, cutting.passage_chars), path)
    annotations, at = document.annotation_sets[0].annotations, f"{path}.annotation_sets[0].annotations"
    yield from (
        Rejected(f"{at}.{key}", "labels has no such hypothesis") for key in annotations if key not in hypotheses
    )

    def rows(key: str, hypothesis: str, _at: str) -> Iterator[Item]:
        if key not in annotations:
            raise UnfitError("there is no such annotation")
        return _pair_rows(contract, key, hypothesis, _evidence(annotations[key], contract), cutting)

    yield from each(hypotheses, at, rows)


def _evidence(raw: Any, contract: _Contract) -> list[Span]:
    """Return the spans that decide a hypothesis; none where it is not mentioned."""
    annotation = read_as(_Annotation, raw)
    if (annotation.choice == _NOT_MENTIONED) != (not annotation.spans):
        raise UnfitError(f"choice is {annotation.choice}, with {len(annotation.spans)} spans")
    evidence: list[Span] = []
    for index in annotation.spans:
        if not 0 <= index < len(contract.spans):
            raise UnfitError(f"span {index} is none of the contract's {len(contract.spans)}")
        span = trimmed(contract.text, contract.spans[index])
        if span is None:
            raise UnfitError(f"span {index} has nothing but white space")
        evidence.append(span)
    return evidence


def _pair_rows(
    contract: _Contract, key: str, hypothesis: str, evidence: list[Span], cutting: PassageSettings
) -> Iterator[ImportedRow | LeftOut]:
    """Yield rows of one hypothesis: every passage with evidence, and as many without as configured (at least one)."""
    held = [
        [(start - begin, end - begin) for start, end in evidence if begin <= start and end <= stop]
        for begin, stop in contract.passages
    ]
    without = [index for index, spans in enumerate(held) if not spans]
    count = None if cutting.negatives is None else cutting.negatives * max(1, len(held) - len(without))
    chosen = set(drawn(without, count, lambda index: (contract.name, key, index)))
    for index, (begin, stop) in enumerate(contract.passages):
        if not held[index] and index not in chosen:
            continue
        text = contract.text[begin:stop]
        yield ImportedRow(
            id=f"{contract.name}:{key}:{index}",
            group=contract.name,
            criterion=hypothesis,
            text=text,
            label=int(bool(held[index])),
            evidence=joined(text, held[index]),
            place=f"{contract.path}, {key}, passage {index}",
        )
    if len(without) > len(chosen):
        yield LeftOut(len(without) - len(chosen))
