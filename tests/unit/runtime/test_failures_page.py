"""The page of failures says what the tables say, of every kind and every text, and names tests that are there."""

import ast
from functools import cache
from pathlib import Path

import pytest

from dryfit.core.failure import PERMITTED, FailureKind
from dryfit.runtime.failures import fault_texts
from dryfit.runtime.failures.classify import ROWS
from dryfit.runtime.failures.fault_texts import Text
from failures_page import _ACTIONS, ENTRIES, PAGE, SYMPTOMS, follows, render

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "write it anew: see tests/support/failures_page.py"


def section(kind: FailureKind) -> str:
    return render().split(f"\n### {kind}\n")[1].split("\n### ")[0]


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_has_a_section_with_what_its_tables_say(kind: FailureKind) -> None:
    text = " ".join(section(kind).split())
    assert follows(PERMITTED[kind]) in text
    for stage in PERMITTED[kind].stages:
        assert _ACTIONS[stage.action] in text
    for row in ROWS:
        if row.kind is kind:
            assert row.source in text
    assert f"(#{kind})" in render() or not any(row.texts for row in ROWS if row.kind is kind)


def test_every_text_of_the_tables_can_be_searched_for() -> None:
    page = render().split("## By kind")[0]
    known = [value for name, value in vars(fault_texts).items() if name.isupper() and isinstance(value, tuple)]
    texts = {one.text for group in known for one in group if isinstance(one, Text)}
    assert len(texts) > 50
    assert not [text for text in texts if text.replace("|", "\\|") not in page]


def test_a_text_that_several_kinds_are_known_by_names_them_all() -> None:
    (line,) = [line for line in render().splitlines() if line.startswith("| `CUDA out of memory. Tried to allocate`")]
    assert "[oom_device](#oom_device) or [oom_neighbour](#oom_neighbour)" in line


SEARCHED = [
    "CUDA out of memory. Tried to allocate",
    "CUDA error: device-side assert triggered",
    "Cannot copy out of meta tensor; no data!",
    "is killed by signal: Killed",
    "Bus error. It is possible that dataloader's workers are out of shared memory",
    "No space left on device",
    "CategoricalDistribution does not support dynamic value space",
    "NCCL error",
    "79",
    "no output (a hang)",
    "zombies",
    "Expected all tensors to be on the same device",
    "the loss is `nan`",
]


@pytest.mark.parametrize("words", SEARCHED)
def test_what_users_search_for_is_there(words: str) -> None:
    assert words in render().split("## By kind")[0]


@cache
def named_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


NAMED = sorted({test for entry in ENTRIES.values() for test in entry.tests} | {symptom.test for symptom in SYMPTOMS})


@pytest.mark.parametrize("name", NAMED)
def test_every_test_that_is_named_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert function.startswith("test_")
    assert function in named_in(ROOT / file)


def test_every_kind_has_a_proof_of_its_recognition_and_one_of_what_follows() -> None:
    assert set(ENTRIES) == set(FailureKind)
    assert not [kind for kind, entry in ENTRIES.items() if len(entry.tests) < 2]
