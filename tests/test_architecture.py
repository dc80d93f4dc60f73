"""ARCHITECTURE.md leads to the right places: its map is the tree, its paths exist, its tables stay short."""

import re
from collections import Counter

import pytest

from module_map import PAGE, ROOT, SOURCE, map_text, packages, summary, with_map

TEXT = PAGE.read_text("utf-8")
MOST_TERMS = 25
MOST_CELL_CHARACTERS = 200
MOST_OVERVIEW_WORDS = 1500
"""What one reads in five minutes, paths and all, at 300 words a minute."""
MOST_OF_ONE_NAME = 2
MODULES = (5, 15)
FEW: dict[str, str] = {
    "jobs/planning": "the parts of one job",
    "reporting/comparing": "the answer of one command, which the report page reads too",
    "runtime/rehearsal": "other people's scripts, apart from trials",
    "search": "what concerns all of its sub-packages",
    "starter": "what `dryfit init` writes, and nothing else",
    "tasks/rows": "the public face of reading rows, for tasks of one's own",
    "tasks/saved": "saved models",
}
"""Packages with fewer modules, each with the reason."""


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def test_the_map_names_every_module_once_as_the_tree_has_them():
    assert with_map(TEXT) == TEXT, "make map"
    named = re.findall(r"^- `(\w+)`: ", section("Map"), re.MULTILINE)
    assert len(named) == len([path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]) > 300


def test_each_module_says_what_it_is_in_a_line_or_two():
    for _package, modules in packages():
        for path in modules:
            assert 15 < len(summary(path)) <= 160, (path, summary(path))


def test_a_stale_map_is_noticed():
    assert with_map(TEXT.replace("- `ledger`: ", "- `ledgers`: ")) == TEXT
    with pytest.raises(SystemExit):
        with_map("a page without a map")
    assert map_text().count("\n### ") == len(list(packages()))


def test_every_path_that_is_named_exists():
    paths = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", TEXT)
    assert len(paths) > 80
    missing = [path for path in paths if not any((base / path).exists() for base in (SOURCE, ROOT, SOURCE.parent))]
    study_folder = {"trials/", "final/", "cache/", "logs/", "prepare/", "report/"}
    assert not [path for path in missing if path not in study_folder]


def test_the_overview_is_read_in_five_minutes():
    assert len(re.findall(r"\w+", TEXT.partition("## To change something")[0])) <= MOST_OVERVIEW_WORDS


def test_tables_stay_short():
    terms = [line for line in section("Words").splitlines() if line.startswith("|")][2:]
    assert 10 < len(terms) <= MOST_TERMS
    cells = [cell.strip() for line in TEXT.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    assert not [cell for cell in cells if len(cell) > MOST_CELL_CHARACTERS]


def test_rooms_are_neither_halls_nor_closets_and_no_name_stands_thrice():
    counts = {package: len(modules) for package, modules in packages() if package != "."}
    few, most = MODULES
    assert not {package: count for package, count in counts.items() if count > most}
    assert {package for package, count in counts.items() if count < few} <= set(FEW)
    names = Counter(path.name for _, modules in packages() for path in modules)
    assert not {name: count for name, count in names.items() if count > MOST_OF_ONE_NAME}
