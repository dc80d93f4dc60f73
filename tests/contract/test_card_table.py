"""The table of models and cards in docs/cards.md: it says what was planned, and a plan made now says the same."""

import re

import pytest

import card_table
import dryfit
from card_table import CARDS, GIB, MODELS, WAYS, best, rows_of, table_of, usable_bytes, ways_of, with_table
from dryfit.settings.memory_terms import VerdictKind

PLAN_PAGE = (card_table.ROOT / "docs" / "plan.md").read_text("utf-8")
PAGE = card_table.PAGE.read_text("utf-8")
ROWS = rows_of(table_of(PAGE))
ROUNDED = 0.05
"""Figures have one decimal."""


def figures_of(model: str) -> dict[str, float]:
    """What a row says that is needed, in GiB; ways without a figure are left out."""
    return {way: float(cell) for way, cell in zip(WAYS, ROWS[model], strict=False) if cell}


def test_the_table_has_every_model_and_says_that_it_is_planned() -> None:
    assert tuple(ROWS) == MODELS
    assert all(len(row) == len(WAYS) + len(CARDS) for row in ROWS.values())
    assert re.match(r"\*\*Planned, not measured\*\*: \d{4}-\d\d-\d\d, torch 2\.\d+", table_of(PAGE))
    assert with_table(PAGE, table_of(PAGE)) == PAGE


@pytest.mark.parametrize("model", MODELS)
def test_a_row_holds_together(model: str) -> None:
    figures = figures_of(model)
    assert list(figures) == ways_of(model) and list(figures.values()) == sorted(figures.values())
    for size, cell in zip(CARDS, ROWS[model][len(WAYS) :], strict=True):
        usable = usable_bytes(size) / GIB
        fitting = [way for way in figures if figures[way] <= usable + ROUNDED]
        surely = [way for way in figures if figures[way] <= usable - ROUNDED]
        assert cell in {(ways or ["-"])[-1] for ways in (fitting, surely)}


def test_the_way_that_needs_most_is_told() -> None:
    needed = {"QLoRA": 10 * GIB, "LoRA": 20 * GIB, "full": 100 * GIB}
    assert [best(needed, size) for size in CARDS] == ["QLoRA", "QLoRA", "LoRA", "LoRA", "LoRA"]
    assert best({"QLoRA": usable_bytes(12)}, 12) == "QLoRA" and best({"QLoRA": usable_bytes(12) + 1}, 12) == "-"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "card"), [("qlora-7b-12gb", "rtx3060"), ("qlora-7b-24gb", "rtx4090")])
def test_a_preset_in_four_bits_fits_its_card_as_it_is_told(name: str, card: str) -> None:
    answer = dryfit.plan(preset=name, device=card)
    assert answer.verdict is VerdictKind.FITS and answer.memory is not None
    told = re.search(rf"^\| `{name}` \|.* ([\d.]+) GiB of the [\d.]+ of an? `{card}` \|", PLAN_PAGE, re.MULTILINE)
    assert told is not None and float(told[1]) == round(answer.memory.required_bytes / GIB, 1)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("way", ["QLoRA", "full"])
def test_a_plan_made_now_says_what_the_table_says(way: str) -> None:
    model = "meta-llama/Llama-3.2-1B"
    assert round(card_table.required_bytes(model, way) / GIB, 1) == figures_of(model)[way]
