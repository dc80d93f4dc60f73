"""The page of failures says what the tables say, of every kind and every text, and names tests that are there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from dryfit.documents.report_tables import NO_FAULTS
from dryfit.processes.failure_texts import FATAL_XIDS
from dryfit.processes.failures import ROWS
from dryfit.settings.errors import PERMITTED, Action, FailureKind, Permission, Stage

DOCS = Path(__file__).parents[3] / "docs"
INDEX, KINDS = (DOCS / "failures.md").read_text(encoding="utf-8").split("## By kind\n")
SECTIONS = dict(section.split("\n", 1) for section in KINDS.split("### ")[1:])
ACTIONS = {
    Action.RETRY: "retried",
    Action.FALLBACK: "retried with the next fallback of its plan, while there is one",
    Action.EXCLUSIVE: "retried alone on its device",
    Action.ELSEWHERE: "retried on another device",
    Action.LIGHTER: "retried with half the loader workers and tensors shared through files",
    Action.DIAGNOSE: "run once more with blocking launches to locate the error",
    Action.UNPLANNED: "its memory stays unknown (`execution.unknown`)",
    Action.GIVE_UP: "the trial ends FAILED",
    Action.PRUNE: "the trial ends PRUNED",
    Action.PAUSE: "the study stops with exit status 3 or 130, resumable",
    Action.STOP_STUDY: "the study ends with exit status 4; the trial stays open",
}
TRIES = {Action.RETRY, Action.FALLBACK, Action.EXCLUSIVE, Action.ELSEWHERE, Action.LIGHTER, Action.DIAGNOSE}


def follows(permission: Permission) -> str:
    """What a kind permits, in words."""
    parts = [stage_text(stage) for stage in permission.stages]
    if permission.stages[-1].times is not None or permission.stages[-1].action is Action.FALLBACK:
        parts.append(ACTIONS[permission.then])
    text = "; then ".join(parts)
    if any(stage.action in TRIES for stage in permission.stages):
        text += "; a counted retry" if permission.counts else "; not a counted retry"
    if permission.first_delay_s:
        text += f"; pauses grow from {permission.first_delay_s:g} s"
    return text + ("; samplers treat it as a refused point" if permission.blames_point else "")


def stage_text(stage: Stage) -> str:
    if stage.times is None or stage.action is Action.DIAGNOSE:
        return ACTIONS[stage.action]
    return f"{ACTIONS[stage.action]}, {'once' if stage.times == 1 else f'up to {stage.times} times'}"


def words(section: str) -> str:
    return " ".join(section.split())


def message(sentence: str) -> str:
    return re.sub(r"\{(\w+)\}", r"`<\1>`", sentence)


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_has_a_section_with_what_its_tables_say(kind: FailureKind) -> None:
    text, rows = words(SECTIONS[kind]), [row for row in ROWS if row.kind is kind]
    no_fault = " It counts as no failure in the shares of `status`." if kind in NO_FAULTS else ""
    assert f"**Effect**: {follows(PERMITTED[kind])}.{no_fault} - **Remedy**: " in text
    assert all(f'"{message(row.sentence)}"' in text for row in rows if row.sentence != "{said}")


def test_every_text_of_the_tables_can_be_searched_for_and_names_its_kinds() -> None:
    kinds: dict[str, dict[FailureKind, None]] = {}
    for kind in map(FailureKind, SECTIONS):
        for text in (text for row in ROWS if row.kind is kind for text in row.texts):
            kinds.setdefault(text.replace("|", "\\|"), {})[kind] = None
    assert len(kinds) > 50
    found = dict(re.findall(r"^\| `(.+)` \| (\[[^|]+\)) \|$", INDEX, re.MULTILINE))
    assert {text: " or ".join(f"[{kind}](#{kind})" for kind in known) for text, known in kinds.items()}.items() <= (
        found.items()
    )
    assert f" for {', '.join(map(str, FATAL_XIDS))}; others" in INDEX


@cache
def named_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_kind_has_proofs_and_every_test_that_is_named_exists() -> None:
    assert set(SECTIONS) == set(FailureKind)
    link = re.compile(r"\[(test_\w+)\]\((\.\./tests/[\w/]+\.py)\)")
    assert [kind for kind, section in SECTIONS.items() if len(link.findall(section)) < 2] == []
    named = link.findall(INDEX + KINDS)
    assert len(named) > 60
    assert [name for name, file in named if name not in named_in(DOCS / file)] == []


def test_every_action_follows_something() -> None:
    stages = {stage.action for one in PERMITTED.values() for stage in one.stages}
    assert stages | {one.then for one in PERMITTED.values()} == set(Action)


def test_only_the_last_stage_may_go_on_for_ever() -> None:
    for permission in PERMITTED.values():
        assert permission.stages and all(stage.times is not None for stage in permission.stages[:-1])
        assert all(stage.times is None or stage.times > 0 for stage in permission.stages)
