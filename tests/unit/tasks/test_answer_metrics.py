"""What generated answers are measured by: exactly, by the words of a quotation, by a function of the user's own."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import LmSettings
from dryfit.tasks.generation import Answered, OwnNumber, answer_metric, mean_of, measured, scored_answers, words_f1
from dryfit.tasks.row_metrics import difference_interval


def answered(pairs: list[tuple[str, str]], quotes: list[bool] | None = None) -> Answered:
    ids = tuple(f"r{number}" for number in range(len(pairs)))
    said, wanted = tuple(zip(*pairs, strict=True))
    return Answered(ids, tuple(f"{one}?" for one in ids), wanted, tuple(quotes or [True] * len(pairs)), said)


def test_an_exact_match_is_to_the_letter() -> None:
    found = answered([("yes", "yes"), ("Yes", "yes"), ("no", "no"), ("y es", "yes")])
    assert mean_of("exact_match", scored_answers(found, "none")) == 0.5


@pytest.mark.parametrize(
    ("said", "wanted", "f1"),
    [
        ("I feel sad", "I feel sad", 1.0),
        ("feel sad", "I feel sad", 0.8),
        ("sad sad sad", "I feel sad", 1 / 3),
        ("sad sad", "sad", 2 / 3),
        ("Sad", "sad", 0.0),
        ("", "sad", 0.0),
        ("", "", 1.0),
        ("\u6211\u7761", "\u6211\u7761\u5f97\u4e0d\u597d", 4 / 7),
    ],
)
def test_words_of_a_quotation(said: str, wanted: str, f1: float) -> None:
    assert words_f1(said, wanted) == words_f1(wanted, said) == pytest.approx(f1)


def test_none_is_no_quotation() -> None:
    """A text that quotes the word of none is not half right; and answers to other prompts do not count."""
    pairs = [("none", "none"), ("none of it", "none"), ("none", "I walk"), ("I", "I walk"), ("yes", "yes")]
    found = mean_of("token_f1", scored_answers(answered(pairs, [True] * 4 + [False]), "none"))
    assert found == pytest.approx((1 + 0 + 0 + 2 / 3) / 4)
    assert math.isnan(mean_of("token_f1", scored_answers(answered([("a", "a")], [False]), "none")))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    answer_metric.cache_clear()


def written(place: Path, body: str, name: str = "judge") -> str:
    file = place / f"m{abs(hash((body, str(place))))}.py"  # a module is imported once
    file.write_text(body, encoding="utf-8")
    return f"{file}:{name}"


def test_a_number_has_the_functions_name_and_a_dict_its_own(place: Path) -> None:
    share = answer_metric(written(place, "def judge(a, w):\n    return sum(x == y for x, y in zip(a, w)) / len(a)\n"))
    assert share.of(answered([("x", "x"), ("x", "y"), ("z", "y"), ("q", "q")])) == {"judge": OwnNumber(0.5)}
    body = "def judge(answers, wanted, *, prompts, ids):\n    return {'n': len(ids), 'p': prompts[0] == ids[0] + '?'}\n"
    several = answer_metric(written(place, body))
    assert several.names == ("n", "p")
    assert several.of(answered([("x", "x")])) == {"n": OwnNumber(1.0), "p": OwnNumber(1.0)}
    assert several.source and several.source != share.source


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def judge(answers):\n    return 1\n", "it takes (answers)"),
        ("def judge(a, w):\n    x = 1\n    return x / 0\n", "it raised ZeroDivisionError: division by zero"),
        ("def judge(a, w):\n    return 'good'\n", "it returned 'judge': 'good'"),
        ("def judge(a, w):\n    return [1.0]\n", "it returned 'judge': [1.0]"),
        ("def judge(a, w):\n    return [1.0, 'b']\n", "a list of one for each answer"),
        ("def judge(a, w):\n    return {}\n", "it returned an empty dict"),
        ("def judge(a, w):\n    return {'loss': 1.0}\n", "'loss' is the name of one of dryfit's own metrics"),
        ("def judge(a, w):\n    return {'Rouge-L': 1.0}\n", "'Rouge-L' is no name of a metric"),
        ("judge = 3\n", "it is a int"),
        ("import nothing_of_that_name\ndef judge(a, w):\n    return 1\n", "nothing_of_that_name"),
        ("def judged(a, w):\n    return 1\n", "did you mean judged?"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(place: Path, body: str, said: str) -> None:
    name = written(place, body)
    with pytest.raises(ConfigError) as caught:
        answer_metric(name)
    assert said in str(caught.value)
    if "ZeroDivision" in said:
        assert f"({name.rpartition(':')[0]}:3)" in str(caught.value)


def test_a_list_has_a_value_for_each_row_and_so_an_interval(place: Path) -> None:
    body = (
        "import numpy as np\n\n\ndef judge(a, w):\n"
        "    same = [x == y for x, y in zip(a, w)]\n"
        "    return {'same': same, 'lengths': np.array([len(x) for x in a]), 'whole': sum(same) / len(same)}\n"
    )
    lm = LmSettings(format="criteria", metric=written(place, body))
    found = measured(lm, [4, 7, 9], answered([("x", "x"), ("yes", "y"), ("z", "y")]))
    assert found.metrics == {"exact_match": 1 / 3, "same": 1 / 3, "lengths": 5 / 3, "whole": 1 / 3}
    rows = list(found.rows.values())
    assert list(found.rows) == [4, 7, 9] and [row.values["lengths"] for row in rows] == [1, 3, 1]
    many = [replace(rows[at % 3], id=f"r{at}") for at in range(60)]
    none = [replace(row, values=dict.fromkeys(row.values, 0.0)) for row in many]
    interval = difference_interval("same", [many], [none], {})
    assert interval is not None and interval.is_known and interval.low < 1 / 3 < interval.high
    assert difference_interval("whole", [many], [none], {}) is None
    bad = answer_metric(written(place, "def judge(a, w):\n    return [float('nan'), 1.0]\n"))
    assert bad.of(answered([("x", "x"), ("y", "y")]))["judge"].rows == ()


def test_what_goes_wrong_later_is_said_too(place: Path) -> None:
    body = (
        "def judge(a, w):\n    if len(a) == 3:\n        raise KeyError(a[0])\n    return {'xyz'[len(a) % 2] * 2: 1}\n"
    )
    name = written(place, body)
    found = answer_metric(name)
    with pytest.raises(ConfigError, match=r"it raised KeyError: 'a' .*py:3"):
        found.of(answered([("a", "b")] * 3))
    with pytest.raises(ConfigError, match="it returned yy"):
        found.of(answered([("a", "b")]))
