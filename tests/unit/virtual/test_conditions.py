"""Conditions on values that nobody knows: no guard ends a script, no loop is without an end."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from dryfit.gpu import values
from dryfit.gpu.values import PATIENCE, ROUNDS, STEADY_ROUNDS, Conditions


@pytest.fixture(autouse=True)
def asked_from_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no frame of this file count: torch asks in C."""
    monkeypatch.setattr(values, "_BETWEEN", (*values._BETWEEN, __file__))


class Unknown:
    """A value of which only a :class:`Conditions` says whether it is true."""

    def __init__(self, held_bytes: Callable[[], int] = lambda: 0) -> None:
        self.conditions = Conditions(held_bytes)
        self.said: list[str] = []

    def __bool__(self) -> bool:
        truth, what = self.conditions.answer()
        self.said.append(what)
        return truth

    def __gt__(self, other: object) -> "Unknown":
        return self

    def __contains__(self, one: object) -> bool:
        return bool(self)

    def all(self) -> bool:
        return bool(self)


def function(folder: Path, body: str) -> Callable[[Any], Any]:
    """Return a function of one argument whose source stands in a file."""
    file = folder / "asks.py"
    file.write_text("import sys\n\ndef ask(x):\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    spec = importlib.util.spec_from_file_location("asks", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ask


GUARDS = (
    "assert {}",
    "assert {}, 'no'",
    "if {}:\n    pass\nelse:\n    raise ValueError",
    "if not ({}):\n    raise ValueError",
    "if not ({}): sys.exit(3)",
    "if not ({}):\n    print('bad')\n    exit()",
    "if {}:\n    return 1\nraise ValueError",
    "if not ({}):\n    pass\nelse:\n    return 1\nraise ValueError",
    "for _ in range(3):\n    if {}:\n        break\nelse:\n    raise ValueError",
    "for _ in range(3):\n    if {}:\n        return 1\nraise ValueError",
    "while True:\n    if {}:\n        break\n    raise ValueError",
    "for _ in range(3):\n    if {}:\n        continue\n    raise ValueError",
    "if 2 > 3:\n    pass\nelif not ({}):\n    raise ValueError",
    "with open(__file__):\n    if {}: return 1\nraise ValueError",
)
ASKS = ("x", "x.all()", "bool(x)", "x > 0", "1 in x", "1 not in x", "(y := x)")


@pytest.mark.parametrize("guard", GUARDS)
def test_no_guard_ends_the_script(tmp_path: Path, guard: str) -> None:
    draw = random.Random(guard)

    def test(depth: int) -> str:
        match draw.randrange(4) if depth else 0:
            case 0:
                return draw.choice(ASKS)
            case 1:
                return f"not {test(depth - 1)}" if draw.random() < 0.5 else f"not ({test(depth - 1)})"
            case 2:
                return f"({test(depth - 1)} and {test(depth - 1)})"
            case _:
                return f"({test(depth - 1)} or {test(depth - 1)})"

    for _ in range(30):
        unknown = Unknown()
        asked = test(3)
        folder = tmp_path / str(_)
        folder.mkdir()
        try:
            function(folder, guard.format(asked))(unknown)
        except BaseException as error:
            raise AssertionError(f"{guard.format(asked)!r} ended in {error!r}") from error
        assert unknown.said and all("goes on" in text for text in unknown.said)


LOOPS = (
    "while x:\n    pass",
    "while not x.all():\n    pass",
    "while True:\n    if x: break",
    "while True:\n    if not x: break",
    "while True:\n    if x:\n        pass\n    else:\n        break",
    "changed = True\nwhile changed:\n    changed = False\n    if x:\n        changed = True",
    "going = True\nwhile going:\n    going = x.all()",
    "while True:\n    if x:\n        continue\n    return",
)


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_ends(tmp_path: Path, loop: str) -> None:
    unknown = Unknown()
    function(tmp_path, loop)(unknown)
    assert len(unknown.said) <= 2 * PATIENCE  # a loop's test stands at its beginning and at its end
    why = unknown.said[-1] if len(unknown.said) > 1 else ""
    assert not why or f"asked {PATIENCE} times" in why or f"left after {STEADY_ROUNDS}" in why


WHILES = (
    "while x:\n    pass",
    "while not x.all():\n    x.all",
    "while len('ab') > 1 and not (x > 0):\n    x.all\nelse:\n    x.all",
)


@pytest.mark.parametrize("loop", WHILES)
@pytest.mark.parametrize(("each", "has_gradient"), [(2**21, True), (2**21, False), (512, True)])
def test_a_loop_on_values_is_left_by_what_its_rounds_keep(
    tmp_path: Path, loop: str, each: int, has_gradient: bool
) -> None:
    unknown = Unknown(lambda: each * len(unknown.said))
    with torch.set_grad_enabled(has_gradient):
        function(tmp_path, loop)(unknown)
    keeps = each > 2**20
    rounds = (ROUNDS if has_gradient else PATIENCE) if keeps else STEADY_ROUNDS
    assert len(unknown.said) == 1 + rounds  # one before the first round
    assert [f"{tmp_path}/asks.py:4" in text for text in unknown.conditions.open] == [True] * (keeps and has_gradient)


def test_a_loop_that_two_conditions_end_is_left_by_both(tmp_path: Path) -> None:
    unknown = Unknown()
    function(tmp_path, "for _ in range(3):\n    while not (x and x.all()):\n        x.all")(unknown)
    assert len(unknown.said) == 3 * (1 + STEADY_ROUNDS + 1)


def test_loops_that_run_once_each_keep_nothing_in_rounds(tmp_path: Path) -> None:
    """What other code keeps between one run of a loop and the next is none of the loop's."""
    unknown = Unknown(lambda: 2**21 * len(unknown.said))
    code = "done = []\nfor _ in range(40):\n    while x:\n        if done: break\n        done.append(_)\n"
    code += "    done = []\nreturn _"
    assert function(tmp_path, code)(unknown) == 39
    assert not unknown.conditions.open


def test_what_only_leaves_is_answered_so_that_more_runs(tmp_path: Path) -> None:
    code = "done = []\nfor i in range(3):\n    if x: continue\n    done.append(i)\n"
    code += "if not x: return\nif x:\n    x = 1\n    return done"
    assert function(tmp_path, code)(Unknown()) == [0, 1, 2]


def test_what_has_no_source_is_true() -> None:
    ask = compile("1 if x else 2", "no file", "eval")
    assert FunctionType(ask, {"x": Unknown()})() == 1
