import pytest

from dryfit.tasks.row_metrics import collapsed
from dryfit.tasks.scored_rows import ScoredRow


def rows(part: str, *pairs: tuple[object, object]) -> list[ScoredRow]:
    return [ScoredRow(str(at), {part: right}, {part: said}) for at, (right, said) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (rows("class", (0, 1), (1, 1), (0, 1)), "every row is answered with class 1"),
        (rows("class", ([0], []), ([], []), ([1, 2], [])), "every row is answered with no class"),
        (rows("class", ([0], [0, 1]), ([], [0, 1])), "every row is answered with the classes 0, 1"),
        (rows("span", ([[0, 4]], None), ([], None)), "every row is answered with no span"),
        (rows("span", ([[0, 4]], [0, 9]), ([], [0, 9])), "every row is answered with the characters 0 to 9"),
        (rows("text", ("yes", "no"), ("no", "no")), "every row is answered with 'no'"),
        (rows("class", (0, 1), (1, 0)), ""),
        (rows("class", (1, 1), (1, 1)), ""),  # it is right for all: the rows are to blame
        (rows("class", (0, 1)), ""),  # of one row nothing can be said
        ([], ""),
        ([ScoredRow("a", {}, {}), ScoredRow("b", {}, {})], ""),
    ],
)
def test_one_answer_for_all_rows(found: list[ScoredRow], words: str) -> None:
    assert collapsed(found) == words


def test_each_part_is_looked_at_for_itself() -> None:
    both = [
        ScoredRow("a", {"class": 0, "span": []}, {"class": 0, "span": None}),
        ScoredRow("b", {"class": 1, "span": [[1, 2]]}, {"class": 1, "span": None}),
    ]
    assert collapsed(both) == "every row is answered with no span"


def test_rows_that_were_not_asked_do_not_count() -> None:
    asked = rows("text", ("yes", "no"), ("no", "no"))
    assert collapsed([*asked, ScoredRow("c", {}, {})]) == "every row is answered with 'no'"
