"""A generator of synthetic posts, seeded and pure: does the writer, now, express a criterion?

A row's label is 1 if and only if some sentence of its text expresses its criterion, of the writer and at present.
The hard negatives use the same words: a denial, something past, something said of another person, another
criterion. One frame turns a phrase into its contrary (``I do not sleep soundly``), so what counts is how words
combine, and a linear model of words and word pairs does not solve it.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

from dryfit.core.errors import ConfigError
from dryfit.core.seeds import derive_seed
from dryfit.core.wire import write_text_atomic
from dryfit.starter.phrases import (
    ABOUT_OTHERS,
    AFFIRMING,
    CRITERIA,
    FILLERS,
    NOW,
    PEOPLE,
    REVERSING,
    THEN,
    VERBS,
    Criterion,
)

DEFAULT_DIFFICULTY: Final = 0.5
_POSTS_PER_AUTHOR: Final = 4
_EASIEST_PHRASES: Final = 2
_FILLER_SHARE: Final = 0.65
"""Of the other sentences: what fillers leave over bears on other criteria, and must be told apart by matching."""

_ABOUT_OTHERS_SHARE: Final = 0.2


class Row(TypedDict):
    """One row of a data set of the task *criteria*."""

    id: str
    group: str
    criterion: str
    text: str
    label: int
    evidence: list[list[int]]


@dataclass(frozen=True, slots=True)
class _Knobs:
    """What a difficulty means.

    Attributes:
        hard_negatives: Share of the label 0 that bears on the criterion at all.
        contrasts: Share of posts in which writer and somebody else are opposites, in the same words for both labels.
        reversed_share: Share of the writer's own sentences that turn a phrase into its contrary.
        distractors: Further sentences of a post.
        phrases: Wordings used of each criterion, each way.
    """

    hard_negatives: float
    contrasts: float
    reversed_share: float
    distractors: int
    phrases: int

    @classmethod
    def of(cls, difficulty: float) -> "_Knobs":
        if not 0 <= difficulty <= 1:
            raise ConfigError("making posts", f"difficulty {difficulty:g}", "a number from 0 to 1")
        most_phrases = min(len(phrases) for c in CRITERIA for phrases in (c.shows, c.opposes))
        return cls(
            hard_negatives=0.5 + 0.3 * difficulty,
            contrasts=0.9 * difficulty,
            reversed_share=0.25 * difficulty**3,
            distractors=1 + round(2 * difficulty**2),
            phrases=_EASIEST_PHRASES + round((most_phrases - _EASIEST_PHRASES) * difficulty),
        )


@dataclass(slots=True)
class _Writer:
    """Draws sentences."""

    rng: random.Random
    knobs: _Knobs

    def about_self(self, criterion: Criterion, *, expressed: bool) -> str:
        """A sentence that expresses the criterion of the writer now, or denies it."""
        reversing = self.rng.random() < self.knobs.reversed_share
        phrases = criterion.shows if expressed != reversing else criterion.opposes
        return self._fill(self.rng.choice(REVERSING if reversing else AFFIRMING), phrases)

    def about_another(self, criterion: Criterion, *, holds: bool) -> str:
        """A sentence that says of somebody else that the criterion holds, or does not."""
        return self._fill(self.rng.choice(ABOUT_OTHERS), criterion.shows if holds else criterion.opposes)

    def distractor(self, criterion: Criterion) -> str:
        """A sentence on something else: nothing in particular, or another criterion in any way."""
        if self.rng.random() < _FILLER_SHARE:
            return self.rng.choice(FILLERS)
        if self.rng.random() < _ABOUT_OTHERS_SHARE:
            return self.about_another(criterion, holds=self.rng.random() < 0.5)
        return self.about_self(criterion, expressed=self.rng.random() < 0.5)

    def _fill(self, frame: str, phrases: Sequence[str]) -> str:
        base = self.rng.choice(phrases[: self.knobs.phrases])
        verb, rest = base.split(" ", 1) if " " in base else (base, "")
        third, past = (f"{form} {rest}".strip() for form in VERBS[verb])
        words = {"now": self.rng.choice(NOW), "then": self.rng.choice(THEN), "who": self.rng.choice(PEOPLE)}
        words |= {name.capitalize(): word[0].upper() + word[1:] for name, word in words.items()}
        return frame.format(base=base, third=third, past=past, **words)


def _post(writer: _Writer, criterion: Criterion, label: int) -> tuple[str, list[list[int]]]:
    """One text and the spans of the sentences that express the criterion."""
    rng = writer.rng
    bearing: list[tuple[str, bool]] = []
    if label:
        bearing.append((writer.about_self(criterion, expressed=True), True))
        if rng.random() < writer.knobs.contrasts:  # the same words as in the negatives, the other way round
            bearing.append((writer.about_another(criterion, holds=False), False))
    elif rng.random() < writer.knobs.hard_negatives:
        bearing.append((writer.about_another(criterion, holds=True), False))
        if rng.random() < writer.knobs.contrasts:
            bearing.append((writer.about_self(criterion, expressed=False), False))
    elif rng.random() < writer.knobs.hard_negatives:
        bearing.append((writer.about_self(criterion, expressed=False), False))
    others = rng.sample([other for other in CRITERIA if other is not criterion], writer.knobs.distractors)
    sentences = bearing + [(writer.distractor(other), False) for other in others]
    rng.shuffle(sentences)
    text, spans = "", list[list[int]]()
    for sentence, expresses in sentences:
        start = len(text) + (1 if text else 0)
        text = f"{text} {sentence}" if text else sentence
        if expresses:
            spans.append([start, len(text)])
    return text, spans


def generate(n_rows: int, seed: int, difficulty: float = DEFAULT_DIFFICULTY) -> list[Row]:
    """Make rows of the task *criteria*; the same arguments always give the same rows.

    Args:
        n_rows: How many rows; half of them (the odd one less) have label 1, and no text occurs twice.
        seed: Seed of everything drawn.
        difficulty: From 0 (no reversals, one distractor, few wordings) to 1.

    Raises:
        ConfigError: ``n_rows`` is below 1, or ``difficulty`` outside [0, 1].
    """
    if n_rows < 1:
        raise ConfigError("making posts", f"{n_rows} rows", "at least 1")
    rng = random.Random(derive_seed("posts", seed))
    writer = _Writer(rng, _Knobs.of(difficulty))
    labels = [number % 2 for number in range(n_rows)]
    rng.shuffle(labels)
    rows: list[Row] = []
    seen: set[str] = set()
    while len(rows) < n_rows:
        label = labels[len(rows)]
        criterion = rng.choice(CRITERIA)
        text, evidence = _post(writer, criterion, label)
        if text in seen:
            continue
        seen.add(text)
        number = len(rows)
        rows.append(
            Row(
                id=f"post-{number:05d}",
                group=f"author-{number // _POSTS_PER_AUTHOR:04d}",
                criterion=criterion.text,
                text=text,
                label=label,
                evidence=evidence,
            )
        )
    return rows


def write_splits(
    folder: Path, sizes: tuple[int, int, int], seed: int, difficulty: float = DEFAULT_DIFFICULTY
) -> list[Path]:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``; they share no author, id or text.

    Args:
        folder: An existing folder.
        sizes: Rows of train, validation and test.
        seed: Seed of everything drawn.
        difficulty: From 0 to 1; see :func:`generate`.

    Returns:
        The files written.
    """
    # One stream cut at authors' bounds: what is unique in it is unique across the splits.
    whole = [-(-size // _POSTS_PER_AUTHOR) * _POSTS_PER_AUTHOR for size in sizes]
    rows = generate(sum(whole), seed, difficulty)
    paths: list[Path] = []
    start = 0
    for name, size, reserved in zip(("train", "validation", "test"), sizes, whole, strict=True):
        part = rows[start : start + size]
        start += reserved
        path = folder / f"{name}.jsonl"
        write_text_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part), durable=False)
        paths.append(path)
    return paths
