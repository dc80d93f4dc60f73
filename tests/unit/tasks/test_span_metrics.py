"""Metrics of spans against SQuAD's on texts whose words are all different, and by hand."""

import math
import random
from collections import Counter

import numpy as np
import pytest

from dryfit.tasks.spans import row_scores, span_metrics
from dryfit.tasks.windows import Ragged, word_spans

Span = tuple[int, int]


def scored(texts: list[str], golds: list[list[Span]], answers: list[Span | None]):
    words = Ragged.of([word_spans(text) for text in texts])
    ragged = Ragged.of([np.array(spans, dtype=np.int32).reshape(-1, 2) for spans in golds])
    given = np.array([answer or (0, 0) for answer in answers], dtype=np.int64)
    return row_scores(given, ragged, words), span_metrics(given, ragged, words)


def squad_f1(said: str, wanted: str) -> float:
    """F1 of words, as SQuAD's evaluate-v1.1.py computes it; nothing in these texts is normalised away."""
    shared = sum((Counter(said.split()) & Counter(wanted.split())).values())
    return 2 * shared / (len(said.split()) + len(wanted.split()))


def test_exact_match_and_f1_are_squads() -> None:
    rng = random.Random(5)
    texts: list[str] = []
    golds: list[list[Span]] = []
    answers: list[Span | None] = []
    for row in range(60):
        count = rng.randint(1, 12)
        texts.append(" ".join(f"w{row}x{word}" for word in range(count)))
        places = [tuple(span) for span in word_spans(texts[-1]).tolist()]

        def drawn(places: list[Span] = places) -> Span:
            first = rng.randrange(len(places))
            return places[first][0], places[rng.randrange(first, len(places))][1]

        golds.append([drawn() for _ in range(rng.randint(1, 3))])
        answers.append(rng.choice(golds[-1]) if rng.random() < 0.3 else drawn())
    scores, metrics = scored(texts, golds, answers)
    for row, (text, spans, answer) in enumerate(zip(texts, golds, answers, strict=True)):
        assert answer is not None
        said, wanted = text[slice(*answer)], [text[slice(*span)] for span in spans]
        assert scores.f1_R[row] == pytest.approx(max(squad_f1(said, one) for one in wanted))
        assert scores.exact_R[row] == (said in wanted)
    assert metrics["token_f1"] == pytest.approx(scores.f1_R.mean())
    assert metrics["exact_match"] == pytest.approx(scores.exact_R.mean())
    assert 0.2 < metrics["exact_match"] < 0.9
    assert metrics["token_f1_has"] == metrics["token_f1"] == pytest.approx(metrics["span_balanced"])
    assert math.isnan(metrics["null_recall"])
    assert metrics["null_precision"] == 0.0


def test_all_metrics_by_hand() -> None:
    #       0         10
    text = "one two three four"
    golds: list[list[Span]] = [[(0, 7)], [(0, 3), (8, 13)], [(4, 7)], [(0, 3)], [], [], []]
    answers: list[Span | None] = [(4, 13), (8, 13), (5, 6), None, None, None, (0, 3)]
    scores, metrics = scored([text] * 7, golds, answers)
    # Words: 1 of 2 shared with 2 given; the second gold span; a cut word counts; none of one; both none; one of none.
    f1 = [0.5, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    iou = [3 / 13, 1.0, 1 / 3, 0.0, 1.0, 1.0, 0.0]
    assert scores.f1_R.tolist() == f1
    assert scores.iou_R == pytest.approx(iou)
    assert scores.exact_R.tolist() == [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert metrics == pytest.approx(
        {
            "span_balanced": (2.5 / 4 + 2 / 3) / 2,
            "token_f1": sum(f1) / 7,
            "exact_match": 3 / 7,
            "span_iou": sum(iou) / 7,
            "token_f1_has": 2.5 / 4,
            "null_precision": 2 / 3,
            "null_recall": 2 / 3,
        }
    )


def test_the_right_word_at_the_wrong_place_does_not_count() -> None:
    scores, _ = scored(["sad and sad"], [[(0, 3)]], [(8, 11)])
    assert (scores.f1_R[0], scores.iou_R[0], scores.exact_R[0]) == (0.0, 0.0, 0.0)


def test_of_several_golds_each_metric_takes_its_best() -> None:
    """A short gold span inside a long word: the one with the best F1 is not the one with the best overlap."""
    text = "abcdefghij kl"
    scores, _ = scored([text], [[(0, 1), (0, 13)]], [(0, 10)])
    assert scores.f1_R[0] == 1.0
    assert scores.iou_R[0] == pytest.approx(10 / 13)


def test_rows_do_not_reach_into_each_other() -> None:
    _, metrics = scored(["a b", "c d", "e"], [[], [(0, 1)], []], [None, (0, 1), None])
    assert metrics["token_f1"] == metrics["exact_match"] == metrics["null_recall"] == metrics["null_precision"] == 1.0
    _, metrics = scored(["a b", "c d"], [[], []], [(2, 3), (0, 3)])
    assert math.isnan(metrics["token_f1_has"])
    assert (metrics["null_recall"], metrics["token_f1"], metrics["span_balanced"]) == (0.0, 0.0, 0.0)
