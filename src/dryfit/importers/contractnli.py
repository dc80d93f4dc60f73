"""Import ContractNLI: contracts, hypotheses about them, and the evidence spans that decide each.

Format: Koreeda and Manning, "ContractNLI" (Findings of EMNLP 2021), stanfordnlp.github.io/contract-nli:
``{"documents": [{"id", "text", "spans": [[start, end]], "annotation_sets": [{"annotations": {"nda-1": {"choice",
"spans": [index of a span]}}}]}], "labels": {"nda-1": {"short_description", "hypothesis"}}}``, where choice is
Entailment, Contradiction or NotMentioned, and only the last has no spans.

A contract is divided into passages, so that each span lies in one passage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, StrictInt, StrictStr, ValidationError

from dryfit.core.errors import DataError
from dryfit.importers.files import has_keys, top_level
from dryfit.importers.items import ImportedRow, Item, LeftOut, Rejected, Span, drawn, joined, json_fault, trimmed


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
    try:
        file = _File.model_validate(document)
    except ValidationError as error:
        hint = "is it SQuAD? `dryfit import squad`" if has_keys(document, "data") else ""
        allowed = '{"documents": [contracts], "labels": {hypotheses}}'
        raise DataError(f"reading {source}", top_level(document), allowed, hint) from error
    hypotheses: dict[str, str] = {}
    for key, raw in file.labels.items():
        try:
            hypotheses[key] = _Label.model_validate(raw).hypothesis
        except ValidationError as error:
            yield json_fault(error, f"{source}, labels.{key}")
    seen: dict[str, str] = {}
    for number, raw in enumerate(file.documents):
        path = f"{source}, documents[{number}]"
        contract = _contract(raw, path, cutting)
        if isinstance(contract, Rejected):
            yield contract
            continue
        parsed, annotation_sets = contract
        first = seen.setdefault(parsed.name, path)
        if first != path:
            yield Rejected(path, f"id {parsed.name!r} is there already: {first}")
            continue
        for index in range(1, len(annotation_sets)):
            yield Rejected(f"{path}.annotation_sets[{index}]", "only the first set of a contract is read")
        yield from _contract_rows(parsed, annotation_sets[0], hypotheses, cutting)


def _contract(raw: Any, path: str, cutting: PassageSettings) -> tuple[_Contract, list[_AnnotationSet]] | Rejected:
    try:
        document = _Document.model_validate(raw)
    except ValidationError as error:
        return json_fault(error, path)
    for index, (start, end) in enumerate(document.spans):
        if not 0 <= start <= end <= len(document.text):
            size = len(document.text)
            return Rejected(f"{path}.spans[{index}]", f"[{start}, {end}] is outside the text of {size} characters")
    if not document.annotation_sets:
        return Rejected(f"{path}.annotation_sets", "there is none")
    passages = passages_of(document.text, document.spans, cutting.passage_chars)
    contract = _Contract(str(document.id), document.text, document.spans, passages, path)
    return contract, document.annotation_sets


def _contract_rows(
    contract: _Contract, annotation_set: _AnnotationSet, hypotheses: dict[str, str], cutting: PassageSettings
) -> Iterator[Item]:
    path = f"{contract.path}.annotation_sets[0].annotations"
    for key in annotation_set.annotations:
        if key not in hypotheses:
            yield Rejected(f"{path}.{key}", "labels has no such hypothesis")
    for key, hypothesis in hypotheses.items():
        if key not in annotation_set.annotations:
            yield Rejected(f"{path}.{key}", "there is no such annotation")
            continue
        evidence = _evidence(annotation_set.annotations[key], contract, f"{path}.{key}")
        if isinstance(evidence, Rejected):
            yield evidence
        else:
            yield from _pair_rows(contract, key, hypothesis, evidence, cutting)


def _evidence(raw: Any, contract: _Contract, path: str) -> list[Span] | Rejected:
    """Return the spans that decide a hypothesis; none where it is not mentioned."""
    try:
        annotation = _Annotation.model_validate(raw)
    except ValidationError as error:
        return json_fault(error, path)
    if (annotation.choice == _NOT_MENTIONED) != (not annotation.spans):
        return Rejected(path, f"choice is {annotation.choice}, with {len(annotation.spans)} spans")
    evidence: list[Span] = []
    for index in annotation.spans:
        if not 0 <= index < len(contract.spans):
            return Rejected(path, f"span {index} is none of the contract's {len(contract.spans)}")
        span = trimmed(contract.text, contract.spans[index])
        if span is None:
            return Rejected(path, f"span {index} has nothing but white space")
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
