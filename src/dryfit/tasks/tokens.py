"""Rows as token ids. A task of your own imports ``TokenSet`` from here."""

import json
import shutil
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
import xxhash
from safetensors.torch import load, save_file
from transformers import PreTrainedTokenizerBase

from dryfit.settings.errors import ConfigError, DataError, InternalError
from dryfit.settings.files import empty_beside
from dryfit.settings.splits import derive_seed
from dryfit.tasks.rows import TRAIN, Readable, Row, Splits, UnlabelledRow

# Packing: which examples share a sequence, as a pure function of (lengths, capacity, seed).


def pack(lengths: Sequence[int], capacity: int, *, seed: int) -> list[list[int]]:
    """Return the examples of each sequence, by best fit decreasing; the seed decides among equal lengths.

    It needs at most 11/9 of the fewest sequences possible, and one more (Johnson et al. 1974, SIAM J. Comput. 3(4)).

    Args:
        lengths: Tokens of each example, from 1 to ``capacity``.
        capacity: Most tokens of a sequence.
        seed: Of the order among equals, within a sequence and of the sequences.
    """
    if lengths and not 1 <= min(lengths) <= max(lengths) <= capacity:
        raise InternalError("packing examples", f"lengths from {min(lengths)} to {max(lengths)}, capacity {capacity}")
    generator = torch.Generator().manual_seed(derive_seed(seed, "packs"))
    mixed = torch.randperm(len(lengths), generator=generator).tolist()
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # keys of `with_room` with a sequence, ascending
    for example in sorted(mixed, key=lambda one: -lengths[one]):
        index = bisect_left(rooms, lengths[example])
        if index == len(rooms):
            place, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[index]
            place = with_room[room].pop()
            if not with_room[room]:
                rooms.pop(index)
        packs[place].append(example)
        left = room - lengths[example]
        if not with_room[left]:
            insort(rooms, left)
        with_room[left].append(place)
    return [_mixed(packs[index], generator) for index in torch.randperm(len(packs), generator=generator).tolist()]


def _mixed(examples: list[int], generator: torch.Generator) -> list[int]:
    return [examples[index] for index in torch.randperm(len(examples), generator=generator).tolist()]


# Sampling of windows for an epoch, and of the heads that each window trains.
#
# Dimension suffix: ``W`` windows.


def epoch_windows(has_span_W: torch.Tensor, negatives: float, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the windows of one epoch, ascending: all with a span, and others drawn anew for each epoch.

    A pure function, so that a resumed trial continues with the same windows; every epoch has as many.

    Args:
        has_span_W: Which windows have a gold span.
        negatives: Windows without a span for each with one, as far as there are enough.
        seed: Seed of the trial's batch order.
        epoch: From 0.
    """
    with_span, without = has_span_W.nonzero()[:, 0], (~has_span_W).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(derive_seed(seed, "negatives", epoch))
    drawn = torch.randperm(len(without), generator=generator)[: round(negatives * len(with_span))]
    return torch.cat([with_span, without[drawn]]).sort().values


def epoch_roles(
    has_span_W: torch.Tensor, *, criteria_share: float | None, negatives: float | None, seed: int, epoch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw which heads each window trains, anew for each epoch.

    Windows with a gold span and those without are divided separately. Of two or more windows of a kind, each head gets
    some. A pure function, so that a resumed trial continues with the same; every epoch has as many of each.

    Args:
        has_span_W: Which windows have a gold span.
        criteria_share: Share of the windows that train the class; the others train the span. None: all train both.
        negatives: Windows without a span that train the span, for each with one that does, as far as there are enough;
            None: all.
        seed: Seed of the trial's batch order.
        epoch: From 0.

    Returns:
        Which windows train the class, and which the span; both, or none, are possible.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "roles", epoch))
    classes_W, spans_W = torch.zeros_like(has_span_W), torch.zeros_like(has_span_W)
    of_spans: list[torch.Tensor] = []
    for group in (has_span_W.nonzero()[:, 0], (~has_span_W).nonzero()[:, 0]):
        drawn = group[torch.randperm(len(group), generator=generator)]
        cut = 0 if criteria_share is None else _cut(len(group), criteria_share)
        classes_W[drawn if criteria_share is None else drawn[:cut]] = True
        of_spans.append(drawn[cut:])
    with_span, without = of_spans
    kept = without if negatives is None else without[: round(negatives * len(with_span))]
    spans_W[torch.cat([with_span, kept])] = True
    return classes_W, spans_W


def _cut(count: int, share: float) -> int:
    """Return that share of a count; of two or more neither none nor all."""
    return min(max(round(share * count), 1), count - 1) if count > 1 else round(share * count)


# Tokenised rows: made once for each (data, model, length), then shared by all trials. No text is kept.
#
# Dimension suffixes: ``T`` all tokens of a split one after another, ``R`` rows.


_FORMAT = 2
_CHUNK_ROWS = 1000
_META_FILE = "tokens.json"
_EXTRA = "extra."
CLASSES: Final = "classes"
"""Name in :attr:`TokenSet.extra`, and in a batch, of each row's class or classes where its label is something else."""
# With transformers 5 these return no token types by default, with which their models were pretrained.
_SEGMENTED = frozenset({"AlbertTokenizer", "XLNetTokenizer"})


@dataclass(frozen=True, slots=True)
class TokenSet:
    """One tokenised split. A row here may be a window of a row of the data.

    Attributes:
        ids_T: Token ids of all rows, int32.
        types_T: Segment of each token, uint8; None where the tokenizer has no segments.
        starts_R: Where each row begins, int64, and a last entry where the last one ends.
        labels_R: Label of each row, as its task makes them. Of ``criteria``: int64; with ``multi_label`` (rows,
            classes), uint8, 1 for each class of the row.
        row_ids: ``id`` of each row, or the file that has them: only messages need them.
        extra: Further tensors of a task, by name. Two splits are joined by concatenation, so that nothing in here may
            count from the split's beginning.
        source_R: Where rows are windows: the row of the data that each is of, int64, from 0, ascending. None: rows are
            no windows.
    """

    ids_T: torch.Tensor
    types_T: torch.Tensor | None
    starts_R: torch.Tensor
    labels_R: torch.Tensor
    row_ids: tuple[str, ...] | Path = ()
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    source_R: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels_R)

    def names_of(self, rows: Sequence[int]) -> tuple[str, ...]:
        """Return the ids of some rows, for messages; ``row 7`` (from 0) where ids are missing."""
        ids = _read_row_ids(self.row_ids) if isinstance(self.row_ids, Path) else self.row_ids
        return tuple(ids[row] if 0 <= row < len(ids) else f"row {row}" for row in rows)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The id of each row of the data, in order; see :meth:`names_of`."""
        if self.source_R is None:
            return self.names_of(range(len(self)))
        firsts_R = torch.searchsorted(self.source_R, torch.arange(self.sources))
        return self.names_of(firsts_R.tolist())

    @property
    def sources(self) -> int:
        """Number of rows of the data."""
        return len(self) if self.source_R is None else int(self.source_R[-1]) + 1

    @property
    def lengths_R(self) -> torch.Tensor:
        """Tokens of each row."""
        return self.starts_R[1:] - self.starts_R[:-1]

    def label_counts(self, num_labels: int) -> dict[int, int]:
        """Return the number of rows of each class; empty without any classes."""
        labels = self.extra.get(CLASSES, self.labels_R)
        has_several = labels.ndim > 1
        if labels.is_floating_point() or (has_several and labels.dtype != torch.uint8):
            return {}
        if bool((labels < 0).any()):
            return {}
        counts = labels.sum(dim=0) if has_several else torch.bincount(labels, minlength=num_labels)
        return dict(enumerate(counts.tolist()))


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """Facts of the tokens of a task's data; the defaults hold before there are any.

    Attributes:
        pad_id: The token rows are padded with.
        cls_last: The classification token stands at the end of a row, not at its start.
        pairs: Rows are (criterion, text), not text alone.
        train_rows: Rows of the training split.
        label_counts: Training rows that have each class.
    """

    pad_id: int = 0
    cls_last: bool = False
    pairs: bool = True
    train_rows: int = 0
    label_counts: Mapping[int, int] = field(default_factory=dict[int, int])


NOT_TOKENISED: Final = TokenFacts()
"""Facts where there are no tokens yet, or none are needed."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """All splits of a data set for one (model, length).

    Attributes:
        pad_id: The token rows are padded with.
        cls_last: The classification token stands at the end of a row, not at its start.
        pairs: Rows are (criterion, text), not text alone.
    """

    splits: Mapping[str, TokenSet]
    pad_id: int
    cls_last: bool
    pairs: bool

    def facts(self, num_labels: int) -> TokenFacts:
        """Return what a task needs to know of these tokens."""
        train = self.splits.get(TRAIN)
        return TokenFacts(
            pad_id=self.pad_id,
            cls_last=self.cls_last,
            pairs=self.pairs,
            train_rows=len(train) if train is not None else 0,
            label_counts=train.label_counts(num_labels) if train is not None else {},
        )


def token_folder(cache_dir: Path, *, data_fingerprint: str, identity: str, max_length: int, task: str = "") -> Path:
    """Return the cache folder of the tokens of one (data, model, length, task's token key)."""
    parts = "\x1f".join((str(_FORMAT), data_fingerprint, identity, str(max_length), *((task,) if task else ())))
    return cache_dir / xxhash.xxh3_128_hexdigest(parts.encode())


def tokenise(
    splits: Splits, labels: Mapping[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Tokens:
    """Tokenise (criterion, text), or text alone, truncating only the text.

    Args:
        splits: Rows by split.
        labels: Their labels, by split; the first dimension is the row.
        tokenizer: The model's.
        max_length: Tokens a row is cut to.

    Raises:
        DataError: A criterion leaves no room for any text.
        ConfigError: The tokenizer has no padding token.
    """
    check_room((row for rows in splits.values() for row in rows), tokenizer, max_length)
    sets = {
        name: replace(token_set(rows, labels[name], tokenizer, max_length), row_ids=tuple(row.id for row in rows))
        for name, rows in splits.items()
    }
    return tokens_of(sets, tokenizer, pairs=splits[TRAIN][0].criterion is not None)


def tokens_of(sets: Mapping[str, TokenSet], tokenizer: PreTrainedTokenizerBase, *, pairs: bool) -> Tokens:
    """Return tokenised splits with the facts that the tokenizer states.

    Raises:
        ConfigError: The tokenizer has no padding token.
    """
    pad_id = tokenizer.pad_token_id
    if not isinstance(pad_id, int):
        raise ConfigError("tokenising the data", "the tokenizer has no padding token", allowed="an encoder's tokenizer")
    train = sets[TRAIN]
    first, last = (int(train.ids_T[0]), int(train.ids_T[int(train.starts_R[1]) - 1]))
    return Tokens(sets, pad_id=pad_id, cls_last=cls_is_last(first, last, tokenizer), pairs=pairs)


def cls_is_last(first: int, last: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell from a row's first and last token whether the classification token stands at its end."""
    return last == tokenizer.cls_token_id and first != tokenizer.cls_token_id


def joined(first: TokenSet, second: TokenSet) -> TokenSet:
    """Concatenate two splits of one data set."""
    types = [one.types_T for one in (first, second) if one.types_T is not None]
    sources_R = None
    if first.source_R is not None and second.source_R is not None:
        sources_R = torch.cat([first.source_R, second.source_R + first.sources])
    return TokenSet(
        ids_T=torch.cat([first.ids_T, second.ids_T]),
        types_T=torch.cat(types) if types else None,
        starts_R=torch.cat([first.starts_R, second.starts_R[1:] + first.starts_R[-1]]),
        labels_R=torch.cat([first.labels_R, second.labels_R]),
        extra={name: torch.cat([values, second.extra[name]]) for name, values in first.extra.items()},
        source_R=sources_R,
    )


def save_tokens(folder: Path, tokens: Tokens) -> None:
    """Write tokens by one rename, safe against a kill and against another process that writes the same."""
    temporary = empty_beside(folder)
    for name, split in tokens.splits.items():
        tensors = {"ids": split.ids_T, "starts": split.starts_R, "labels": split.labels_R}
        if split.types_T is not None:
            tensors["types"] = split.types_T
        if split.source_R is not None:
            tensors["source"] = split.source_R
        tensors |= {f"{_EXTRA}{key}": values for key, values in split.extra.items()}
        save_file(tensors, temporary / f"{name}.safetensors")
        (temporary / _row_ids_file(name)).write_text(json.dumps(split.names_of(range(len(split)))), encoding="utf-8")
    meta = {
        "format": _FORMAT,
        "splits": sorted(tokens.splits),
        "pad_id": tokens.pad_id,
        "cls_last": tokens.cls_last,
        "pairs": tokens.pairs,
    }
    (temporary / _META_FILE).write_text(json.dumps(meta), encoding="utf-8")
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / _META_FILE).is_file():
            raise
        shutil.rmtree(temporary)  # another process was first, with the same content


def load_tokens(folder: Path, *, only: tuple[str, ...] | None = None) -> Tokens | None:
    """Read cached tokens; None where there are none.

    Args:
        only: Splits to read; None reads all.
    """
    try:
        meta = json.loads((folder / _META_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    sets: dict[str, TokenSet] = {}
    for name in meta["splits"]:
        if only is None or name in only:
            # Read, not mapped: a removed or replaced cache cannot reach a running trial.
            tensors = load((folder / f"{name}.safetensors").read_bytes())
            sets[name] = TokenSet(
                tensors["ids"],
                tensors.get("types"),
                tensors["starts"],
                tensors["labels"],
                row_ids=folder / _row_ids_file(name),
                extra={key.removeprefix(_EXTRA): values for key, values in tensors.items() if key.startswith(_EXTRA)},
                source_R=tensors.get("source"),
            )
    return Tokens(sets, pad_id=meta["pad_id"], cls_last=meta["cls_last"], pairs=meta["pairs"])


def _row_ids_file(split: str) -> str:
    return f"{split}.row-ids.json"


def _read_row_ids(path: Path) -> tuple[str, ...]:
    try:
        return tuple(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return ()  # the cache was removed or damaged meanwhile: the message that asks must not fail over it


def check_room(rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Refuse criteria that leave no room for any text.

    Raises:
        DataError: The first such criterion.
    """
    for error in crowded_criteria(rows, tokenizer, max_length).values():
        raise error


def crowded_criteria(
    rows: Iterable[Row | UnlabelledRow], tokenizer: PreTrainedTokenizerBase, max_length: int, *, shared: int = 0
) -> dict[str, DataError]:
    """Return an error for each criterion that leaves no room for any text; it names the first row with it.

    Args:
        rows: The rows.
        tokenizer: The model's.
        max_length: Tokens of a row.
        shared: Tokens of the text that must fit beside it, with one more.
    """
    places: dict[str, str] = {}
    for row in rows:
        if row.criterion is not None:
            places.setdefault(row.criterion, row.place)
    if not places:
        return {}
    room = max_length - tokenizer.num_special_tokens_to_add(pair=True) - shared - 1
    windows = f" and span.doc_stride = {shared}" if shared else ""
    encoded = tokenizer(list(places), add_special_tokens=False, verbose=False)
    return {
        criterion: DataError(
            f"tokenising {place}",
            f"criterion {criterion[:60]!r} has {len(ids)} tokens",
            allowed=f"at most {room} with train.max_length = {max_length}{windows}, so that some text is left",
            hint="raise train.max_length or shorten the criterion",
        )
        for (criterion, place), ids in zip(places.items(), encoded["input_ids"], strict=True)
        if len(ids) > room
    }


def numbers_segments(tokenizer: PreTrainedTokenizerBase) -> bool | None:
    """Return True where a tokenizer must be asked for token types; None: its own default."""
    return True if type(tokenizer).__name__ in _SEGMENTED else None


def class_labels(rows: Sequence[Row], num_labels: int) -> torch.Tensor:
    """Return each row's class, (rows,), int64; or lists of classes as (rows, classes), uint8, 1 for each present."""
    several = [row.label for row in rows if isinstance(row.label, tuple)]
    if not several:
        return torch.tensor([row.label for row in rows], dtype=torch.int64)
    has_RC = torch.zeros((len(rows), num_labels), dtype=torch.uint8)
    for row, labels in enumerate(several):
        has_RC[row, list(labels)] = 1
    return has_RC


def token_set(
    rows: Sequence[Readable], labels_R: torch.Tensor, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> TokenSet:
    """Tokenise rows, truncating only the text.

    Args:
        rows: At least one; all with a criterion, or none.
        labels_R: As in :class:`TokenSet`; passed through.
        tokenizer: The model's.
        max_length: Tokens a row is cut to.
    """
    ids: list[torch.Tensor] = []
    types: list[torch.Tensor] = []
    lengths: list[int] = []
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        criteria = [row.criterion for row in chunk if row.criterion is not None]
        texts = [row.text for row in chunk]
        encoded = tokenizer(
            criteria or texts,
            texts if criteria else None,
            truncation="only_second" if criteria else True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=numbers_segments(tokenizer),
        )
        for index, row_ids in enumerate(encoded["input_ids"]):
            ids.append(torch.tensor(row_ids, dtype=torch.int32))
            lengths.append(len(row_ids))
            if "token_type_ids" in encoded:
                types.append(torch.tensor(encoded["token_type_ids"][index], dtype=torch.uint8))
    starts_R = torch.zeros(len(rows) + 1, dtype=torch.int64)
    starts_R[1:] = torch.tensor(lengths).cumsum(0)
    return TokenSet(
        ids_T=torch.cat(ids),
        types_T=torch.cat(types) if types else None,
        starts_R=starts_R,
        labels_R=labels_R,
    )
