"""Damaged tokens, batches and outputs, and what is said of them."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dryfit.settings.errors import ConfigError, DataError
from dryfit.tasks.base import Batch, pad_rows
from dryfit.tasks.guard import BatchGuard, Bounds, check_tokens
from dryfit.tasks.tokens import TokenSet

BOUNDS = Bounds(tokens=50, segments=2, length=8, labels=3)
LENGTHS = (3, 8, 5, 1)
NAMES = ("a", "b", "c", "d")


def token_set() -> TokenSet:
    lengths = torch.tensor(LENGTHS)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(starts[-1])
    ids = torch.arange(total, dtype=torch.int32)
    types = torch.arange(total).remainder(2).to(torch.uint8)
    return TokenSet(ids, types, starts, torch.tensor([0, 2, 1, 0]), row_ids=NAMES)


def changed(values: torch.Tensor, at: int, value: int) -> torch.Tensor:
    values = values.clone()
    values[at] = value
    return values


SETS: list[tuple[Callable[[TokenSet], TokenSet], str, str, str]] = [
    (lambda s: replace(s, ids_T=changed(s.ids_T, 12, 50)), "token id 50 in 1 row: c", "0 to 49", "tokenizer"),
    (lambda s: replace(s, ids_T=changed(s.ids_T, 3, -7)), "token id -7 in 1 row: b", "0 to 49", "cache"),
    (lambda s: replace(s, types_T=changed(s.types_T, 16, 2)), "segment 2 in 1 row: d", "0 to 1", "tokenizer"),  # type: ignore[arg-type]
    (lambda s: replace(s, labels_R=changed(s.labels_R, 1, 3)), "label 3 in 1 row: b", "0 to 2", "cache"),
    (lambda s: replace(s, labels_R=torch.tensor([0, -1, -1, 0])), "label -1 in 2 rows: b, c", "0 to 2", "cache"),
    (lambda s: replace(s, starts_R=changed(s.starts_R, 1, 0)), "no token in 1 row: a", "at least one", "cache"),
    (lambda s: replace(s, starts_R=changed(s.starts_R, 2, 12)), "9 tokens in 1 row: b", "at most 8", "cache"),
    (lambda s: replace(s, starts_R=changed(s.starts_R, 4, 16)), "rows that end at 16", "cover all", "cache"),
    (lambda s: replace(s, labels_R=s.labels_R[:3]), "3 labels, 4 rows", "a label for each", "cache"),
    (lambda s: replace(s, types_T=s.types_T[:4]), "17 and 4 tokens", "cover all", "cache"),  # type: ignore[index]
]


@pytest.mark.parametrize("damage, found, allowed, hint", SETS)
def test_a_damaged_split(damage: Callable[[TokenSet], TokenSet], found: str, allowed: str, hint: str) -> None:
    check_tokens("train", token_set(), BOUNDS)
    with pytest.raises(DataError) as caught:
        check_tokens("train", damage(token_set()), BOUNDS)
    assert caught.value.doing == "checking the tokens of the split train"
    assert found in caught.value.found and allowed in caught.value.allowed and hint in caught.value.hint


def with_places(labels: list[list[int]], nulls: list[int]) -> TokenSet:
    """The same rows with spans for labels."""
    return replace(token_set(), labels_R=torch.tensor(labels), extra={"nulls": torch.tensor(nulls)})


@pytest.mark.parametrize(
    ("labels", "nulls", "found"),
    [
        ([[1, 2], [7, 8], [4, 4], [0, 0]], [0, 0, 0, 0], "place 8 in 1 row: b"),
        ([[1, 2], [6, 7], [4, 4], [-1, 0]], [0, 0, 0, 0], "place -1 in 1 row: d"),
        ([[1, 2], [6, 7], [4, 4], [0, 0]], [2, 7, 5, 0], "place 5 in 1 row: c"),
    ],
)
def test_spans_that_are_not_in_their_rows(labels: list[list[int]], nulls: list[int], found: str) -> None:
    """A place beyond its row would be read from padding, or end the device's kernel."""
    good, bounds = with_places([[1, 2], [6, 7], [4, 4], [0, 0]], [2, 7, 4, 0]), replace(BOUNDS, labels=None)
    check_tokens("train", good, bounds)
    bad = with_places(labels, nulls)
    with pytest.raises(DataError, match=found):
        check_tokens("train", bad, bounds)
    guard = BatchGuard("train", good, bounds)
    for one in (good, bad):
        batch = pad_rows(one, range(4), pad_id=0) | {"labels": one.labels_R, "nulls": one.extra["nulls"]}
        if one is good:
            guard.check_batch(batch, lambda: range(4))
    with pytest.raises(DataError, match=found) as caught:
        guard.check_batch(batch, lambda: range(4))
    assert "set execution.loader_workers = 0" in caught.value.hint


def test_the_last_values_that_are_allowed() -> None:
    tokens = replace(
        token_set(),
        ids_T=changed(token_set().ids_T, 0, 49),
        types_T=torch.ones(17, dtype=torch.uint8),
        labels_R=torch.tensor([2, 2, 2, 2]),
    )
    check_tokens("train", tokens, BOUNDS)
    check_tokens("train", replace(tokens, types_T=None), BOUNDS)
    anything = Bounds(None, None, None, None)
    wild = replace(tokens, ids_T=tokens.ids_T + 10**6, labels_R=tokens.labels_R - 9)
    check_tokens("train", wild, anything)


def test_all_offending_rows_are_counted_and_a_few_named() -> None:
    with pytest.raises(DataError, match=re.escape("token id 99 in 4 rows: a, b, c, d")):
        check_tokens("train", replace(token_set(), ids_T=torch.full((17,), 99, dtype=torch.int32)), BOUNDS)
    many = torch.arange(41)
    tokens = TokenSet(torch.full((40,), 99, dtype=torch.int32), None, many, many[1:], row_ids=())
    with pytest.raises(DataError, match="in 40 rows: row 0, row 1, row 2, row 3, row 4, and 35 more"):
        check_tokens("train", tokens, BOUNDS)


ROWS = [2, 0, 1]


def batch_of(tokens: TokenSet) -> Batch:
    return pad_rows(tokens, ROWS, pad_id=0) | {"labels": tokens.labels_R[ROWS]}


def put(name: str, place: tuple[int, ...], value: int) -> Callable[[Batch], None]:
    def damage(batch: Batch) -> None:
        batch[name][place] = value

    return damage


def swap(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Batch], None]:
    def damage(batch: Batch) -> None:
        batch[name] = change(batch[name])

    return damage


BATCHES: list[tuple[Callable[[Batch], None], str]] = [
    (put("input_ids", (0, 1), 50), "token id 50 in 1 row: c"),
    (put("input_ids", (2, 7), -1), "token id -1 in 1 row: b"),
    (put("input_ids", (1, 6), 2**40), f"token id {2**40} in 1 row: a"),
    (put("token_type_ids", (1, 0), 2), "segment 2 in 1 row: a"),
    (put("labels", (2,), 3), "label 3 in 1 row: b"),
    (put("labels", (0,), -100), "label -100 in 1 row: c"),
    (swap("attention_mask", lambda mask: mask * torch.tensor([[1], [0], [1]])), "mask without a token in 1 row: a"),
    (put("attention_mask", (1, 1), 7), "attention mask 7 in 1 row: a"),
    (swap("attention_mask", lambda mask: mask[:, 1:]), "attention_mask (3, 7)"),
    (swap("labels", lambda labels: labels[1:]), "labels (2,)"),
]


@pytest.mark.parametrize("damage, found", BATCHES)
def test_a_damaged_batch(damage: Callable[[Batch], None], found: str) -> None:
    guard = BatchGuard("validation", token_set(), BOUNDS)
    batch = batch_of(token_set())
    guard.check_batch(batch, lambda: pytest.fail("rows are asked for without need"))
    damage(batch)
    with pytest.raises(DataError, match=re.escape(found)) as caught:
        guard.check_batch(batch, lambda: ROWS)
    assert caught.value.doing == "checking a batch of the split validation"
    assert caught.value.allowed and "loader_workers" in caught.value.hint + "loader_workers" * ("segment" in found)


def test_several_labels_of_a_row() -> None:
    flags = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]], dtype=torch.uint8)
    tokens = replace(token_set(), labels_R=flags)
    guard = BatchGuard("train", tokens, BOUNDS)
    check_tokens("train", tokens, BOUNDS)
    guard.check_batch(batch_of(tokens), lambda: ROWS)
    flags[1, 2] = 2
    with pytest.raises(DataError, match="label 2 in 1 row: b") as caught:
        check_tokens("train", tokens, BOUNDS)
    assert caught.value.allowed == "0 to 1"
    with pytest.raises(DataError, match="label 2 in 1 row: b"):
        guard.check_batch(batch_of(tokens), lambda: ROWS)
    with pytest.raises(DataError, match=r"labels \(4, 2\) in 4 rows"):
        check_tokens("train", replace(tokens, labels_R=flags[:, :2]), BOUNDS)


def test_a_batch_wider_than_the_models_positions() -> None:
    guard = BatchGuard("train", token_set(), replace(BOUNDS, length=7))
    with pytest.raises(DataError, match="8 positions in 3 rows: c, a, b"):
        guard.check_batch(batch_of(token_set()), lambda: ROWS)


def test_a_row_whose_first_token_is_masked_is_not_empty() -> None:
    batch = batch_of(token_set())
    batch["attention_mask"][1] = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0])
    BatchGuard("train", token_set(), BOUNDS).check_batch(batch, lambda: ROWS)


@pytest.mark.parametrize(
    "outputs, found",
    [
        (torch.zeros(3, 4), "(3, 4) torch.float32"),
        (torch.zeros(8, 3), "(8, 3) torch.float32"),
        (torch.zeros(3), "(3,) torch.float32"),
        (torch.zeros(3, 1, 3), "(3, 1, 3)"),
        (torch.zeros(3, 3, dtype=torch.int64), "(3, 3) torch.int64"),
    ],
)
def test_outputs_that_are_no_scores(outputs: torch.Tensor, found: str) -> None:
    guard = BatchGuard("train", token_set(), BOUNDS)
    guard.check_outputs(torch.zeros(3, 3, dtype=torch.bfloat16), 3, lambda: pytest.fail("asked without need"))
    with pytest.raises(ConfigError, match=re.escape(found)) as caught:
        guard.check_outputs(outputs, 3, lambda: ROWS)
    assert "c, a, b" in caught.value.found and "(3, 3)" in caught.value.allowed


def test_outputs_are_checked_without_reading_them() -> None:
    guard = BatchGuard("train", token_set(), BOUNDS)
    guard.check_outputs(torch.empty(3, 3, device="meta"), 3, lambda: ROWS)
    with pytest.raises(ConfigError):
        guard.check_outputs(torch.empty(3, 2, device="meta"), 3, lambda: ROWS)
