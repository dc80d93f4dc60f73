"""The small synthetic data set: posts, generated from a seed."""

import json
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypedDict

from dryfit.settings.errors import ConfigError
from dryfit.settings.files import write_text_atomic
from dryfit.settings.splits import derive_seed

# The wording of the synthetic posts, read from ``phrases.toml``: criteria, phrases for and against them, frames.


_WORDING: Final[dict[str, Any]] = tomllib.loads((files("dryfit.study") / "phrases.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Criterion:
    """A statement about the writer.

    Attributes:
        text: The criterion as the data set states it.
        shows: Phrases that make it true of their subject.
        opposes: Phrases that make it untrue of their subject.
    """

    text: str
    shows: tuple[str, ...]
    opposes: tuple[str, ...]


def _many(table: str, key: str) -> tuple[str, ...]:
    return tuple(_WORDING[table][key])


CRITERIA: Final = tuple(
    Criterion(one["text"], tuple(one["shows"]), tuple(one["opposes"])) for one in _WORDING["criteria"]
)

VERBS: Final[dict[str, tuple[str, str]]] = {verb: (third, past) for verb, (third, past) in _WORDING["verbs"].items()}
"""Third person and past of every verb that opens a phrase."""

AFFIRMING: Final = _many("frames", "affirming")
"""The phrase is true of the writer, now."""

REVERSING: Final = _many("frames", "reversing")
"""The phrase is not true of the writer, now: a phrase that opposes a criterion thereby shows it."""

ABOUT_OTHERS: Final = _many("frames", "about_others")
"""The phrase is true of somebody else; nothing is said of the writer."""

NOW: Final = _many("words", "now")
THEN: Final = _many("words", "then")
PEOPLE: Final = _many("words", "people")
FILLERS: Final = _many("words", "fillers")


# Generate synthetic posts from a seed: does the writer, now, express a criterion?
#
# A row's label is 1 if and only if some sentence of its text expresses its criterion, of the writer and at present.
# Hard negatives are close to that: a denial, something past, something said of another person, another criterion.
# Held-out rows use many wordings that no training row uses. So the task needs what words mean and how they combine,
# and a linear model of words and word pairs does not solve it.


_POSTS_PER_AUTHOR: Final = 4
_DENIED_SHARE: Final = 0.6
"""Share of the rows with label 0 in which the writer says the opposite."""
_OTHERS_SHARE: Final = 0.2
"""Share of the label 0 in which somebody else, not the writer, has what the criterion says."""
_UNSEEN_SHARE: Final = 0.7
"""Share of the sentences of held-out rows whose wording no training row uses."""
_CONTRASTS_SHARE: Final = 0.3
"""Share of posts in which writer and somebody else are opposites, in the same words for both labels."""
_REVERSED_SHARE: Final = 1 / 32
"""Share of the writer's own sentences that turn a phrase into its contrary."""
_ON_OTHERS_SHARE: Final = 0.1
"""Share of further sentences that bear on other criteria, and must be told apart by matching."""


class PostRow(TypedDict):
    """One row of a data set of the task *criteria*."""

    id: str
    group: str
    criterion: str
    text: str
    label: int
    evidence: list[list[int]]


@dataclass(slots=True)
class _Writer:
    """Draws sentences."""

    rng: random.Random
    held_out: bool

    def about_self(self, criterion: Criterion, *, expressed: bool) -> str:
        """Draw a sentence in which the writer expresses the criterion now, or denies it."""
        reversing = self.rng.random() < _REVERSED_SHARE
        phrases = criterion.shows if expressed != reversing else criterion.opposes
        return self._fill(self.rng.choice(REVERSING if reversing else AFFIRMING), phrases)

    def about_another(self, criterion: Criterion, *, holds: bool) -> str:
        """Draw a sentence that says of somebody else that the criterion holds, or does not."""
        return self._fill(self.rng.choice(ABOUT_OTHERS), criterion.shows if holds else criterion.opposes)

    def distractor(self, criterion: Criterion) -> str:
        """Draw a sentence about nothing in particular, or about another criterion."""
        if self.rng.random() < _ON_OTHERS_SHARE:
            return self.about_self(criterion, expressed=self.rng.random() < 0.5)
        return self.rng.choice(FILLERS)

    def _wordings(self, phrases: Sequence[str]) -> Sequence[str]:
        """Return the half of the phrases to use: the first for every row, the second for held-out ones only."""
        half = len(phrases) // 2
        unseen = self.held_out and self.rng.random() < _UNSEEN_SHARE
        return phrases[half:] if unseen else phrases[:half]

    def _fill(self, frame: str, phrases: Sequence[str]) -> str:
        base = self.rng.choice(self._wordings(phrases))
        verb, rest = base.split(" ", 1) if " " in base else (base, "")
        third, past = (f"{form} {rest}".strip() for form in VERBS[verb])
        words = {"now": self.rng.choice(NOW), "then": self.rng.choice(THEN), "who": self.rng.choice(PEOPLE)}
        words |= {name.capitalize(): word[0].upper() + word[1:] for name, word in words.items()}
        return frame.format(base=base, third=third, past=past, **words)


def _post(writer: _Writer, criterion: Criterion, label: int) -> tuple[str, list[list[int]]]:
    """Return a text and the spans of the sentences that express the criterion."""
    rng = writer.rng
    bearing: list[tuple[str, bool]] = []
    kind = rng.random()
    if label or kind < _DENIED_SHARE:
        bearing.append((writer.about_self(criterion, expressed=bool(label)), bool(label)))
        if rng.random() < _CONTRASTS_SHARE:  # the same words as in the other label, the other way round
            bearing.append((writer.about_another(criterion, holds=not label), False))
    elif kind < _DENIED_SHARE + _OTHERS_SHARE:
        bearing.append((writer.about_another(criterion, holds=True), False))
    (other,) = rng.sample([other for other in CRITERIA if other is not criterion], 1)
    sentences = [*bearing, (writer.distractor(other), False)]
    rng.shuffle(sentences)
    text, spans = "", list[list[int]]()
    for sentence, expresses in sentences:
        start = len(text) + (1 if text else 0)
        text = f"{text} {sentence}" if text else sentence
        if expresses:
            spans.append([start, len(text)])
    return text, spans


def generate(n_rows: int, seed: int, *, held_out: bool = False) -> list[PostRow]:
    """Make rows of the task *criteria*; the same arguments always give the same rows.

    Args:
        n_rows: How many rows; half of them (the odd one less) have label 1, and no text occurs twice.
        seed: Seed of everything drawn.
        held_out: Make rows to be scored on: part of their wordings is in no training row.

    Raises:
        ConfigError: ``n_rows`` is below 1.
    """
    if n_rows < 1:
        raise ConfigError("making posts", f"{n_rows} rows", "at least 1")
    return _rows(n_rows, derive_seed("posts", seed), held_out=held_out)


def _rows(n_rows: int, seed: int, *, held_out: bool, earlier: Sequence[PostRow] = ()) -> list[PostRow]:
    """Make rows that share no id, author or text with the earlier ones; the first has a new author."""
    rng = random.Random(seed)
    writer = _Writer(rng, held_out)
    labels = [number % 2 for number in range(n_rows)]
    rng.shuffle(labels)
    seen = {row["text"] for row in earlier}
    authors = len({row["group"] for row in earlier})
    rows: list[PostRow] = []
    while len(rows) < n_rows:
        label = labels[len(rows)]
        criterion = rng.choice(CRITERIA)
        text, evidence = _post(writer, criterion, label)
        if text in seen:
            continue
        seen.add(text)
        number = authors * _POSTS_PER_AUTHOR + len(rows)
        rows.append(
            PostRow(
                id=f"post-{number:05d}",
                group=f"author-{number // _POSTS_PER_AUTHOR:04d}",
                criterion=criterion.text,
                text=text,
                label=label,
                evidence=evidence,
            )
        )
    return rows


def write_splits(folder: Path, sizes: tuple[int, int, int], seed: int) -> list[Path]:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``; they share no author, id or text.

    Args:
        folder: An existing folder.
        sizes: Rows of train, validation and test; the last two are held out, see :func:`generate`.
        seed: Seed of everything drawn.

    Returns:
        The files written.
    """
    earlier: list[PostRow] = []
    paths: list[Path] = []
    for name, size in zip(("train", "validation", "test"), sizes, strict=True):
        rows = _rows(size, derive_seed("posts", seed, name), held_out=name != "train", earlier=earlier)
        earlier += rows
        path = folder / f"{name}.jsonl"
        write_text_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), durable=False)
        paths.append(path)
    return paths
