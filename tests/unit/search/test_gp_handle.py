"""The process of Gaussian processes may die, hang or answer nonsense: every wait ends, and it is said."""

import json
import sys
from pathlib import Path

import pytest

from dryfit.search.samplers import GpProcess, GpQuestion
from dryfit.settings.choices import Direction

ONE = '{"params": {"x": 1.5}}'
QUESTION = GpQuestion(space={"x": "..."}, directions=(Direction.MAXIMIZE,), trials=(), seed=1)
ANSWERS = """
import os, sys, time
starts = os.path.join({folder!r}, "starts")
with open(starts, "a") as file:
    file.write("x")
back = os.fdopen(os.dup(0), "wb", 0)
for line in sys.stdin.buffer:
    {each}
    back.write({answer!r}.encode() + b"\\n")
"""


def process(folder: Path, *, answer: str = ONE, each: str = "pass", answer_s: float = 20.0) -> GpProcess:
    script = ANSWERS.format(folder=str(folder), answer=answer, each=each)
    return GpProcess((sys.executable, "-S", "-c", script), answer_s)


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


def test_one_process_answers_question_after_question(tmp_path: Path) -> None:
    with process(tmp_path) as asked:
        asked.warm()
        assert [asked.ask(QUESTION) for _ in range(3)] == [{"x": 1.5}] * 3
        assert asked.take_trouble() == ""
    assert starts(tmp_path) == 1


def test_one_that_died_since_is_replaced(tmp_path: Path) -> None:
    asked_file = str(tmp_path / "asked")
    asks = f"open({asked_file!r}, 'a').write('x')"
    once = f"{asks} and os.path.getsize({asked_file!r}) == 2 and os._exit(1)"
    with process(tmp_path, each=once) as asked:
        assert [asked.ask(QUESTION) for _ in range(3)] == [{"x": 1.5}] * 3
        assert asked.take_trouble() == ""
    assert starts(tmp_path) == 2


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"each": "os._exit(1)"}, "its process died"),
        ({"each": "time.sleep(60)", "answer_s": 2.0}, "timed out"),
        ({"answer": "{"}, "Invalid JSON"),
        ({"answer": '{"params": {"y": 1}}'}, "it answered something else"),
        ({"answer": '{"trouble": "LinAlgError: singular"}'}, "LinAlgError: singular"),
    ],
)
def test_it_is_asked_twice_and_then_given_up(tmp_path: Path, how: dict[str, object], said: str) -> None:
    with process(tmp_path, **how) as asked:  # type: ignore[arg-type]
        assert asked.ask(QUESTION) is None
        trouble = asked.take_trouble()
    assert said in trouble and "Gaussian process gave no suggestion" in trouble
    assert asked.take_trouble() == ""
    assert starts(tmp_path) == 2


def test_a_question_that_nobody_reads_ends_too(tmp_path: Path) -> None:
    """It is larger than what the system keeps of a socket."""
    large = QUESTION.model_copy(update={"space": {"x": "." * 10_000_000}})
    silent = GpProcess((sys.executable, "-S", "-c", "import time; time.sleep(60)"), 0.5)
    with silent as asked:
        assert asked.ask(large) is None
        assert "timed out" in asked.take_trouble()


def test_a_process_that_cannot_start(tmp_path: Path) -> None:
    with GpProcess((str(tmp_path / "nothing"),)) as asked:
        asked.warm()
        assert asked.ask(QUESTION) is None
        assert "No such file" in asked.take_trouble()


def test_the_question_is_json() -> None:
    assert json.loads(QUESTION.model_dump_json())["directions"] == ["maximize"]
