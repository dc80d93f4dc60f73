import pytest

from dryfit.settings.errors import DataError
from dryfit.study.import_files import ImportedRow, Rejected
from dryfit.study.import_formats import squad_rows
from import_files import squad

FIRST = "dev.json, data[0].paragraphs[0].qas[0]"


def rows_of(document):
    return list(squad_rows(document, "dev.json"))


def changed(**values):
    """A document whose first question is changed."""
    document = squad(1)
    document["data"][0]["paragraphs"][0]["qas"][0] |= values
    return document


def test_a_row_for_each_question_with_all_its_distinct_answers() -> None:
    first, second = rows_of(squad(1))
    assert (first.id, first.group, first.criterion, first.label) == ("q0-a", "Normans_0", "When did they come?", 1)
    assert [first.text[start:end] for start, end in first.evidence] == ["in the 10th century", "10th century"]
    assert (second.label, second.evidence, second.text) == (0, (), first.text)
    assert second.place == "dev.json, data[0].paragraphs[0].qas[1]"


def test_offsets_are_characters_in_any_script() -> None:
    context = "😴 naïve \u202eשלום\u202c é 東京 Ω"  # noqa: RUF001
    answers = [{"text": text, "answer_start": context.index(text)} for text in ("😴", "é", "東京", "שלום")]
    document = changed(answers=answers)
    document["data"][0]["paragraphs"][0]["context"] = context
    row = rows_of(document)[0]
    assert {context[start:end] for start, end in row.evidence} == {"😴", "é", "東京", "שלום"}


def test_a_file_of_squad_1_has_answers_alone() -> None:
    document = squad(1)
    questions = document["data"][0]["paragraphs"][0]["qas"]
    del questions[0]["is_impossible"], questions[1]
    (row,) = rows_of(document)
    assert row.label == 1


def test_an_article_without_a_title_is_a_group_of_its_own() -> None:
    document = squad(3)
    del document["data"][0]["title"]
    document["data"][1]["title"] = " "
    assert [row.group for row in rows_of(document)[::2]] == ["article-0", "article-1", "Normans_2"]


@pytest.mark.parametrize(
    ("values", "where", "reason"),
    [
        (
            {"answers": [{"text": "10th", "answer_start": 3}]},
            ".answers[0]",
            "does not stand at answer_start 3, but at 37",
        ),
        ({"answers": [{"text": "11th", "answer_start": 3}]}, ".answers[0]", "nor anywhere in the context"),
        ({"answers": [{"text": "Rouen", "answer_start": -6}]}, ".answers[0]", "does not stand at answer_start -6"),
        ({"answers": [{"text": "", "answer_start": 3}]}, ".answers[0]", "of 0 characters"),
        ({"answers": [{"text": "10th", "answer_start": 1e9}]}, ".answers[0].answer_start", "valid integer"),
        ({"answers": [{"text": "10th"}]}, ".answers[0].answer_start", "required"),
        ({"answers": "10th"}, ".answers", "valid list"),
        ({"answers": []}, "", "it has no answer"),
        ({"is_impossible": True}, "", "is_impossible is true, and it has 3 answers"),
        ({"is_impossible": "false"}, ".is_impossible", "valid boolean"),
        ({"id": 5}, ".id", "valid string"),
        ({"question": None}, ".question", "valid string"),
    ],
)
def test_what_does_not_fit_is_told_with_its_path_and_the_rest_is_kept(values, where, reason) -> None:
    fault, kept = rows_of(changed(**values))
    assert isinstance(fault, Rejected) and fault.place == FIRST + where
    assert reason in fault.reason
    assert isinstance(kept, ImportedRow) and kept.id == "q0-b"


def test_parts_that_are_none_are_told_one_by_one() -> None:
    document = squad(3)
    document["data"][0] = "Normans"
    document["data"][1]["paragraphs"][0] = {"context": "x"}
    first, second, *rest = rows_of(document)
    assert (first.place, second.place) == ("dev.json, data[0]", "dev.json, data[1].paragraphs[0].qas")
    assert [row.id for row in rest] == ["q2-a", "q2-b"]


@pytest.mark.parametrize(
    ("document", "found"),
    [("text", "of type str"), ({"rows": [], "version": "v2.0"}, "its keys are rows, version"), ({"data": {}}, "data")],
)
def test_another_document_is_refused(document, found) -> None:
    with pytest.raises(DataError, match=found):
        rows_of(document)


def test_contractnli_is_recognised() -> None:
    with pytest.raises(DataError, match="import contractnli"):
        rows_of({"documents": [], "labels": {}})
