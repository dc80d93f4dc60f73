"""Import ReDSM5: posts, and sentences in them that are evidence for or against a symptom.

Format: Bao, Pérez and Parapar, "ReDSM5: A Reddit Dataset for DSM-5 Depression Detection" (CIKM 2025),
github.com/eliseobao/redsm5: posts with ``post_id, text``; annotations with ``post_id, sentence_id, sentence_text,
DSM5_symptom, status, explanation``, where status is 1 (evidence for the symptom) or 0 (an explicit negative). Posts may
also be given sentence by sentence, as ``post_id, sentence_id, sentence_text``.

Every post is annotated for all symptoms, so a symptom without an annotation is absent from the post.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from dryfit.core.errors import DataError
from dryfit.core.text.words import few
from dryfit.importers.files import Record
from dryfit.importers.items import ImportedRow, Item, LeftOut, Rejected, Span, UnfitError, drawn, joined

POST_COLUMNS: Final = ("post_id",)
ANNOTATION_COLUMNS: Final = ("post_id", "sentence_id", "sentence_text", "DSM5_symptom", "status")
_PRESENT: Final = "1"
_ABSENT: Final = "0"


@dataclass(slots=True)
class _Post:
    """A post: its whole text, or its sentences so far."""

    text: str
    place: str
    sentences: dict[str, Span] | None = None

    def add(self, sentence_id: str, sentence: str) -> None:
        """Append a sentence after a space."""
        assert self.sentences is not None
        start = len(self.text) + 1 if self.text else 0
        self.text = f"{self.text} {sentence}" if self.text else sentence
        self.sentences[sentence_id] = (start, start + len(sentence))


@dataclass(slots=True)
class _SymptomNotes:
    """The annotations of a post and a symptom.

    Attributes:
        present: Spans of its evidence.
        absent: Whether an annotation says that the symptom is absent.
        doubtful: Whether an annotation was rejected, so that the label is not known.
    """

    present: list[Span] = field(default_factory=list[Span])
    absent: bool = False
    doubtful: bool = False


def read_criteria(lines: Iterable[str], source: str) -> dict[str, str]:
    """Read the descriptions of symptoms from lines ``SYMPTOM: text`` (or with a tab); ``#`` begins a comment.

    Args:
        lines: Lines of the file.
        source: Its name.

    Raises:
        DataError: A line is of another form, a symptom is there twice, or there is none.
    """
    criteria: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = re.match(r"\s*([^:\t]*[^:\t\s])\s*[:\t]\s*(.*\S)\s*$", line)
        doing = f"reading {source}, line {number}"
        if found is None:
            raise DataError(doing, f"{line[:60]!r} names no symptom", "SYMPTOM: what it is")
        symptom, text = found.groups()
        if symptom in criteria:
            raise DataError(doing, f"{symptom} is there already", "each symptom once")
        criteria[symptom] = text
    if not criteria:
        raise DataError(f"reading {source}", "it names no symptom", "a line for each: SYMPTOM: what it is")
    return criteria


def redsm5_rows(
    posts: Iterable[Record | Rejected],
    annotations: Iterable[Record | Rejected],
    criteria: dict[str, str],
    negatives: int | None,
) -> Iterator[Item]:
    """Yield a row for each post and symptom: label 1 where a sentence is evidence for it, with those sentences.

    Explicit negatives are always rows. Of the symptoms without an annotation, ``negatives`` are drawn for each that the
    post has, and at least for one.

    Args:
        posts: Rows of the file of posts.
        annotations: Rows of the file of annotations.
        criteria: Description of each symptom by its name.
        negatives: See above; None: all of them.

    Raises:
        DataError: The posts have neither text nor sentences.
    """
    reading = _Reading(criteria)
    yield from _rejected(posts, reading.add_post)
    yield from _rejected(annotations, reading.add_annotation)
    for post_id in reading.posts:
        yield from reading.rows(post_id, negatives)


def _rejected(records: Iterable[Record | Rejected], add: Callable[[Record], None]) -> Iterator[Rejected]:
    """Add each record; yield those that do not fit."""
    for record in records:
        try:
            if isinstance(record, Rejected):
                yield record
            else:
                add(record)
        except UnfitError as unfit:
            assert isinstance(record, Record)
            yield Rejected(record.place, str(unfit))


@dataclass(slots=True)
class _Reading:
    """What was read so far.

    Attributes:
        criteria: Description of each symptom by its name.
        posts: By their ids.
        noted: By post and symptom.
        seen: The first annotation of a sentence and a symptom.
    """

    criteria: dict[str, str]
    posts: dict[str, _Post] = field(default_factory=dict[str, _Post])
    noted: dict[tuple[str, str], _SymptomNotes] = field(default_factory=dict[tuple[str, str], _SymptomNotes])
    seen: dict[tuple[str, str, str], Record] = field(default_factory=dict[tuple[str, str, str], Record])

    def add_post(self, record: Record) -> None:
        """Take in a post, or the next sentence of one."""
        post_id = record.values["post_id"]
        if not post_id.strip():
            raise UnfitError("post_id is empty")
        post = self.posts.get(post_id)
        if "text" in record.values:
            if post is not None:
                raise UnfitError(f"post {post_id} is there already: {post.place}")
            self.posts[post_id] = _Post(record.values["text"], record.place)
            return
        if not {"sentence_id", "sentence_text"} <= record.values.keys():
            raise DataError(
                f"reading {record.place}",
                f"the columns are {few(record.values)}",
                "post_id and text, or post_id, sentence_id and sentence_text",
            )
        sentence_id, sentence = record.values["sentence_id"], record.values["sentence_text"].strip()
        if not sentence_id.strip() or not sentence:
            raise UnfitError("sentence_id or sentence_text is empty")
        post = post or self.posts.setdefault(post_id, _Post("", record.place, {}))
        assert post.sentences is not None  # all rows of a file have the same columns
        if sentence_id in post.sentences:
            raise UnfitError(f"sentence {sentence_id} of post {post_id} is there already")
        post.add(sentence_id, sentence)

    def add_annotation(self, record: Record) -> None:
        """Take in an annotation."""
        values = record.values
        post_id, symptom, status = values["post_id"], values["DSM5_symptom"].strip(), values["status"].strip()
        post = self.posts.get(post_id)
        if post is None:
            raise UnfitError(f"there is no post {post_id!r}")
        if symptom not in self.criteria:
            raise UnfitError(f"the criteria have no symptom {symptom!r}: {few(self.criteria, most=12)}")
        pair = self.noted.setdefault((post_id, symptom), _SymptomNotes())
        key = (post_id, values["sentence_id"], symptom)
        first = self.seen.setdefault(key, record)
        if first is not record:
            reason = f"sentence {key[1]} and {symptom} are there already: {first.place}"
            if first.values["status"].strip() == status:
                raise UnfitError(reason)
            pair.doubtful = True
            raise UnfitError(f"{reason}, with another status; {_no_row(post_id, symptom)}")
        span = _located(values["sentence_id"], values["sentence_text"], post)
        if status == _PRESENT and isinstance(span, tuple):
            pair.present.append(span)
        elif status == _ABSENT:
            pair.absent = True  # where it stands does not matter: a row with label 0 has no evidence
        else:
            pair.doubtful = True
            reason = span if isinstance(span, str) else f"status is {status!r}, not 0 or 1"
            raise UnfitError(f"{reason}; {_no_row(post_id, symptom)}")

    def rows(self, post_id: str, negatives: int | None) -> Iterator[ImportedRow | LeftOut]:
        """Yield the rows of a post."""
        post = self.posts[post_id]
        pairs = {symptom: self.noted.get((post_id, symptom), _SymptomNotes()) for symptom in self.criteria}
        pairs = {symptom: pair for symptom, pair in pairs.items() if not pair.doubtful}
        unnoted = [symptom for symptom, pair in pairs.items() if not pair.present and not pair.absent]
        present = sum(bool(pair.present) for pair in pairs.values())
        count = None if negatives is None else negatives * max(1, present)
        chosen = set(drawn(unnoted, count, lambda symptom: (post_id, symptom)))
        for symptom, pair in pairs.items():
            if pair.present or pair.absent or symptom in chosen:
                yield ImportedRow(
                    id=f"{post_id}:{symptom}",
                    group=post_id,
                    criterion=self.criteria[symptom],
                    text=post.text,
                    label=int(bool(pair.present)),
                    evidence=joined(post.text, pair.present),
                    place=f"{post.place}, {symptom}",
                )
        if len(unnoted) > len(chosen):
            yield LeftOut(len(unnoted) - len(chosen))


def _no_row(post_id: str, symptom: str) -> str:
    return f"so there is no row of post {post_id} and {symptom}"


def _located(sentence_id: str, sentence: str, post: _Post) -> Span | str:
    """Find a sentence in its post, or say why that fails.

    White space may differ, as posts were cleaned. Of several occurrences the first is taken, if possible one that is
    not inside of longer words.
    """
    words = sentence.split()
    if not words:
        return "sentence_text is empty"
    if post.sentences is not None:
        span = post.sentences.get(sentence_id)
        if span is None:
            return f"the post has no sentence {sentence_id!r}"
        return span if post.text[slice(*span)].split() == words else f"sentence {sentence_id} of the post is another"
    pattern = r"\s+".join(map(re.escape, words))
    found = re.search(rf"(?<!\w){pattern}(?!\w)", post.text) or re.search(pattern, post.text)
    return found.span() if found is not None else f"sentence {sentence_id} does not stand in the text of its post"
