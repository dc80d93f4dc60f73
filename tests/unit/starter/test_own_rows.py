"""A study of the user's own rows: what is found in a table, and what is refused."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dryfit.settings.choices import BuiltInTask
from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.splits import SplitRule, split_groups
from dryfit.settings.study_file_reading import load_study_file
from dryfit.study.own_data import NO_COLUMN, AmbiguousError, OwnRows, check_separator, own_rows, reference
from dryfit.study.template import check_own, init_own, study_toml

Row = dict[str, Any]


def found(folder: Path, rows: Sequence[Row], given: dict[str, str] | None = None, **more: Any) -> OwnRows:
    """What is found in these rows, as the job that copies them writes them."""
    copied = folder / "copied.jsonl"
    lines = [json.dumps({"row": number, "values": row}) + "\n" for number, row in enumerate(rows, start=2)]
    copied.write_text("".join(lines), encoding="utf-8")
    return own_rows(copied, f"{folder}/rows.csv", "rows.csv", given or {}, **more)


def asked(count: int = 40, **columns: Any) -> list[Row]:
    """Questions on passages; further columns by name, each a value or a function of the row's number."""
    made: list[Row] = []
    for at in range(count):
        row: Row = {"question": f"is it number {at % 3} ?", "passage": f"the number here is {at} and no other one"}
        row["answer"] = ["no", "yes"][at % 2]
        made.append(row | {name: value(at) if callable(value) else value for name, value in columns.items()})
    return made


def test_questions_passages_and_answers(tmp_path: Path) -> None:
    own = found(tmp_path, asked())
    assert own.data == {
        "file": "rows.csv",
        "text": "passage",
        "criterion": "question",
        "label": "answer",
        "labels": ("no", "yes"),
        "validation_fraction": 0.2,
        "test_fraction": 0.2,
    }
    assert own.max_length == 32
    assert own.found == (
        "rows.csv: 40 rows, columns question, passage, answer",
        "text: passage; criterion: question; label: answer; each row is a group of its own",
        "2 classes: no (20), yes (20)",
        "length: 95 % of the rows have at most 17 tokens, estimated; train.max_length is 32",
        "split by group: 24 train, 8 validation, 8 test rows",
    )


@pytest.mark.parametrize(
    ("columns", "data"),
    [
        ({"answer": lambda at: str(at % 3)}, {"num_labels": 3}),
        ({"answer": lambda at: str(at % 3 + 1)}, {"labels": ("1", "2", "3")}),
        ({"answer": lambda at: at % 2 == 0}, {"labels": ("false", "true")}),
        ({"answer": lambda at: json.dumps([[], [0], [0, 1]][at % 3])}, {"num_labels": 2, "multi_label": True}),
        ({"answer": lambda at: [["sad"], ["glad", "sad"]][at % 2]}, {"labels": ("glad", "sad"), "multi_label": True}),
        ({"id": lambda at: f"r{at}"}, {}),
        ({"uid": lambda at: at}, {"id": "uid"}),
        ({"id": lambda at: at % 9}, {"group": "id", "id": NO_COLUMN}),
        ({"author": lambda at: f"a{at % 9}"}, {"group": "author"}),
        ({"group": lambda at: f"a{at % 9}", "user": lambda at: f"b{at % 5}"}, {}),
        ({"criterion": 7}, {"criterion": "question"}),
        ({"criterion": lambda at: ["q1", "q2"][at % 2]}, {"criterion": "question"}),
        ({"criterion": lambda at: ["ja", "sleep"][at % 2]}, {"criterion": "question"}),
        ({"evidence": "a sentence of it"}, {"evidence": NO_COLUMN}),
        ({"passage": lambda at: f"only {at % 7} of these texts differ"}, {"group": "passage"}),
        ({"": lambda at: str(at)}, {}),
    ],
)
def test_what_columns_hold_decides_what_they_are(tmp_path: Path, columns: Row, data: Row) -> None:
    own = found(tmp_path, asked(**columns))
    assert own.data.items() >= data.items()
    usual = {"file", "text", "criterion", "label", "labels", "validation_fraction", "test_fraction", "split_seed"}
    assert own.data.keys() - usual == data.keys() - usual


def spans(count: int = 40, **columns: Any) -> list[Row]:
    """Texts with evidence in each second of them."""
    return [
        {"text": f"the number here is {at} and no other", "evidence": [[4, 10]] if at % 2 else []}
        | {name: value(at) for name, value in columns.items()}
        for at in range(count)
    ]


def test_windows_of_short_rows_share_less_than_they_hold(tmp_path: Path) -> None:
    own = found(tmp_path, spans(), needs=frozenset({"evidence"}))
    assert own.max_length == 32
    assert "doc_stride = 8\n" in study_toml(BuiltInTask.EVIDENCE, "x", own)
    long = found(tmp_path, spans(label=lambda _: "x " * 400), needs=frozenset({"evidence"}))
    assert "doc_stride = 8\n" in study_toml(BuiltInTask.EVIDENCE, "x", long)  # what is not read does not count
    longer = found(tmp_path, [{**row, "text": row["text"] * 20} for row in spans()], needs=frozenset({"evidence"}))
    assert "doc_stride = 32\n" in study_toml(BuiltInTask.EVIDENCE, "x", longer)


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        (None, "holds a list in 39 of 40 rows; the first that is empty in line 5"),
        ("here", "holds a list in 39 of 40 rows"),
    ],
)
def test_evidence_that_is_not_there_in_all_rows_is_named(tmp_path: Path, evidence: str | None, said: str) -> None:
    rows = spans()
    rows[3]["evidence"] = evidence
    with pytest.raises(DataError, match=f"column 'evidence' {said}"):
        found(tmp_path, rows, needs=frozenset({"evidence"}))
    del rows[3]["evidence"]
    with pytest.raises(DataError, match="column 'evidence' is in 39 of 40 rows"):
        found(tmp_path, rows, needs=frozenset({"evidence"}))


def test_a_single_word_is_a_criterion_and_a_code_is_none(tmp_path: Path) -> None:
    words = found(tmp_path, spans(criterion=lambda at: ["sleep", "anhedonia"][at % 2]), needs=frozenset({"evidence"}))
    assert "text: text; criterion: criterion; evidence: evidence" in words.found[1]
    codes = found(tmp_path, spans(criterion=lambda at: ["q1", "q2"][at % 2]), needs=frozenset({"evidence"}))
    assert codes.data["criterion"] == NO_COLUMN


def test_a_task_that_needs_a_criterion_is_refused_without(tmp_path: Path) -> None:
    rows = spans(label=lambda at: at % 2, criterion=lambda at: ["q1", "q2"][at % 2])
    needs = frozenset({"label", "evidence", "criterion"})
    with pytest.raises(AmbiguousError) as caught:
        found(tmp_path, rows, needs=needs)
    assert (caught.value.role, caught.value.candidates) == ("criterion", ("criterion",))
    assert "criterion" not in found(tmp_path, rows, {"criterion": "criterion"}, needs=needs).data


def test_long_texts_and_other_scripts_are_longer_in_tokens(tmp_path: Path) -> None:
    words = found(tmp_path, asked(passage=lambda at: f"word {at} " * 40)).max_length
    dense = found(tmp_path, asked(passage=lambda at: f"文字文字 {at} " * 40)).max_length
    assert 32 < words < dense < 512
    assert found(tmp_path, asked(passage=lambda at: f"word {at} " * 4000)).max_length == 512


@pytest.mark.parametrize(("rows", "train_rows", "evals"), [(20, 12, 1), (40, 24, 1), (42, 26, 2)])
def test_with_few_rows_an_epoch_is_validated_once(tmp_path: Path, rows: int, train_rows: int, evals: int) -> None:
    """The largest batches that the file searches have 24 rows: with no more an epoch is one step."""
    own = found(tmp_path, asked(rows))
    assert own.train_rows == train_rows
    assert f"evals_per_epoch = {evals} " in study_toml(BuiltInTask.CRITERIA, "x", own)


def test_the_split_is_the_one_that_a_study_makes_and_each_part_has_all_classes(tmp_path: Path) -> None:
    rows = asked(30, author=lambda at: f"a{at // 3}", answer=lambda at: "rare" if at in (0, 12, 24) else "usual")
    own = found(tmp_path, rows)
    rule = SplitRule(0.2, 0.2, int(own.data.get("split_seed", 0)))  # type: ignore[arg-type]
    split = split_groups([row["author"] for row in rows], rule, doing="", hint="")
    for name in ("train", "validation", "test"):
        assert {row["answer"] for row in rows if split[row["author"]] == name} == {"rare", "usual"}
    assert rule.seed > 0  # the first split has not


def test_what_a_split_lacks_is_said_and_few_groups_have_no_test(tmp_path: Path) -> None:
    own = found(tmp_path, asked(4))
    assert own.data["test_fraction"] == 0.0
    assert re.fullmatch("split by group: 3 train, 1 validation rows; validation lacks (no|yes)", own.found[-1])


def test_columns_that_are_named_are_taken(tmp_path: Path) -> None:
    rows = asked(other=lambda at: f"another text of number {at}", kind=lambda at: "ab"[at % 2])
    given = {"text": "other", "criterion": "passage", "label": "kind", "group": "question"}
    data = found(tmp_path, rows, given).data
    assert {key: data[key] for key in given} == given
    assert "not read: answer" in found(tmp_path, rows, given).found


AMBIGUOUS = [
    ([{"left": f"some text {at}", "right": f"more text {at}", "label": at % 2} for at in range(9)], "text"),
    ([{"text": f"some text {at}", "a": "xy"[at % 2], "b": "xy"[at % 2]} for at in range(9)], "label"),
    ([{"text": f"some text {at}", "other": at} for at in range(9)], "label"),
    (asked(author=lambda at: f"a{at % 9}", doc_id=lambda at: f"d{at % 8}"), "group"),
]


@pytest.mark.parametrize(("rows", "role"), AMBIGUOUS)
def test_what_is_not_clear_is_refused_with_the_candidates(tmp_path: Path, rows: list[Row], role: str) -> None:
    with pytest.raises(AmbiguousError, match=f"the {role}") as caught:
        found(tmp_path, rows)
    assert caught.value.role == role
    assert caught.value.hint == f"--{role} {caught.value.candidates[0]}"
    assert all(repr(name) in caught.value.allowed for name in caught.value.candidates)
    chosen = caught.value.candidates[0]
    if "other" not in caught.value.candidates:  # which is named, and refused: it has ids
        assert role in found(tmp_path, rows, {role: chosen}).data or chosen == role


@pytest.mark.parametrize(
    ("rows", "given", "said"),
    [
        (asked(), {"label": "anser"}, "did you mean --label answer?"),
        (asked(), {"text": "passage", "label": "passage"}, "'passage' is given as --text and --label"),
        (asked(1), {}, "it has 1 row"),
        ([], {}, "it has no rows"),
        (asked(answer="yes"), {}, "column 'answer' is 'yes' in every row"),
        (asked(answer=lambda at: f"{at}.5"), {}, "holds numbers such as 0.5: that looks like regression"),
        (
            asked(answer=lambda at: "" if at == 3 else "ab"[at % 2]),
            {},
            "'answer' is empty in 1 of 40 rows, first in line 5",
        ),
        (asked(answer=lambda at: None), {}, "'answer' is empty in 40 of 40 rows"),
        (
            asked(answer=lambda at: f"It is {at}, I think"),
            {},
            "in each of 40 rows, such as 'It is 10, I think': ids, or free",
        ),
        (asked(300, answer=lambda at: at // 2), {}, "has 150 different values: that looks like numbers or free text"),
        (asked(answer=lambda at: {"a": at}), {}, "column 'answer' holds objects"),
        (asked(answer=lambda at: "[]" if at else "a"), {}, "has lists in some rows only"),
        (asked(uid=lambda at: f"r{at}"), {"label": "uid"}, "ids, or free text"),
        (asked(uid=lambda at: at), {"text": "uid"}, "column 'uid' holds no text, but '0'"),
        (
            asked(passage=lambda at: " " if at == 1 else f"the text {at}"),
            {},
            "column 'passage' is empty in 1 of 40 rows",
        ),
        (
            [{"good film indeed": f"a film {at}", "1": str(at % 2)} for at in range(9)],
            {},
            "the first line looks like a row",
        ),
        (asked(4, answer=lambda at: "abcd"[at]), {}, "another value in each of 4 rows"),
        (asked(answer=lambda at: "once" if at == 3 else "often"), {}, None),
        (asked(author=lambda at: "" if at else "a"), {"group": "author"}, "'author' is empty in 39 of 40 rows"),
        (asked(author="one"), {"group": "author"}, "1 groups, of which validation takes 1"),
        (asked(author=lambda at: at % 2), {"group": "author"}, "no split leaves rows of every class for training"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(
    tmp_path: Path, rows: list[Row], given: dict[str, str], said: str | None
) -> None:
    if said is None:  # one row of a class can be trained on; that nothing is validated by it is said
        assert "lacks once" in found(tmp_path, rows, given).found[-1]
        return
    with pytest.raises((ConfigError, DataError)) as caught:
        found(tmp_path, rows, given)
    assert said in str(caught.value)


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "copied.jsonl").write_text('{"row": 4, "error": "not JSON"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.csv, line 4: not JSON"):
        own_rows(tmp_path / "copied.jsonl", f"{tmp_path}/rows.csv", "rows.csv", {})


def test_spans_are_evidence_and_a_task_that_needs_them_finds_them(tmp_path: Path) -> None:
    rows = asked(evidence=lambda at: json.dumps([[0, 3]] if at % 2 else []))
    assert "evidence" not in found(tmp_path, rows).data
    own = found(
        tmp_path, [{key: row[key] for key in row if key != "answer"} for row in rows], needs=frozenset({"evidence"})
    )
    assert "label" not in own.data and own.data["criterion"] == "question"
    with pytest.raises(DataError, match="no column `evidence`"):
        found(tmp_path, asked(), needs=frozenset({"label", "evidence"}))


@pytest.mark.parametrize(("separator", "words"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_other_separators_are_named(tmp_path: Path, separator: str, words: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"\ufefftext{separator}label\na, b{separator}1\n", encoding="utf-8")
    with pytest.raises(DataError, match=words) as caught:
        check_separator(str(file))
    assert repr(separator) in caught.value.hint
    file.write_text("text\na\n", encoding="utf-8")
    check_separator(str(file))


def test_a_short_path_is_written_from_the_study(tmp_path: Path) -> None:
    assert reference(f"{tmp_path}/rows.csv", tmp_path / "study") == "../rows.csv"
    assert reference(f"{tmp_path}/study/rows.csv", tmp_path / "study") == "rows.csv"
    assert reference("/far/away/rows.csv", tmp_path / "study") == "/far/away/rows.csv"
    assert reference("hub:org/rows:train", tmp_path) == "hub:org/rows:train"


@pytest.mark.parametrize("preset", [None, "smoke", "standard", "supermax"])
def test_the_study_says_what_was_found_and_loads(tmp_path: Path, preset: str | None) -> None:
    own = found(tmp_path, asked(answer=lambda at: ['a "b"', "ä\\🙂", "no"][at % 3]))
    file = init_own(tmp_path / "study", own, task=BuiltInTask.CRITERIA, force=False, preset=preset)
    data = load_study_file(file).config.data
    assert data.labels == own.data["labels"] and data.num_labels == 3
    assert (data.file, data.text) == (str(tmp_path / "study" / "rows.csv"), "passage")
    with pytest.raises(ConfigError, match="exists"):
        init_own(tmp_path / "study", own, task=BuiltInTask.CRITERIA, force=False, preset=preset)
    init_own(tmp_path / "study", own, task=BuiltInTask.CRITERIA, force=True, preset=preset)


def test_tasks_that_need_more_than_rows_are_refused(tmp_path: Path) -> None:
    for task in (BuiltInTask.CAUSAL_LM, BuiltInTask.OBJECTIVE):
        with pytest.raises(ConfigError, match="needs more than rows"):
            check_own(tmp_path, task=task, force=False, preset=None)
    with pytest.raises(ConfigError, match="there is no preset 'smok'"):
        check_own(tmp_path, task=BuiltInTask.CRITERIA, force=False, preset="smok")


NUMBERS = frozenset({"label", "number"})


def rated(score: Any, count: int = 40, **columns: Any) -> list[Row]:
    return [{key: row[key] for key in row if key != "answer"} for row in asked(count, score=score, **columns)]


@pytest.mark.parametrize("preset", [None, "standard", "max", "supermax"])
def test_numbers_are_a_regression(tmp_path: Path, preset: str | None) -> None:
    own = found(tmp_path, rated(lambda at: f"{at / 8}"), needs=NUMBERS)
    assert {key: own.data[key] for key in ("label", "num_labels")} == {"label": "score", "num_labels": 1}
    assert "numbers from 0 to 4.875, 2.438 in the mean: regression" in own.found
    file = init_own(tmp_path / "study", own, task=BuiltInTask.CRITERIA, force=False, preset=preset)
    config = load_study_file(file).config
    assert [f"{goal.direction} {goal.name}" for goal in config.goals] == ["minimize mse"]
    assert not [key for key in config.space if key.startswith("loss.") or key == "head.threshold"]


def test_numbers_need_no_name_and_some_may_be_whole(tmp_path: Path) -> None:
    rows = [{"body": f"some text {at}", "degree": at % 5 + (0.5 if at % 2 else 0)} for at in range(20)]
    own = found(tmp_path, rows, needs=NUMBERS)
    assert (own.data["label"], own.data["num_labels"]) == ("degree", 1)


def test_a_column_of_classes_is_taken_before_one_of_numbers(tmp_path: Path) -> None:
    own = found(tmp_path, asked(degree=lambda at: f"{at}.5"), needs=NUMBERS)
    assert own.data["label"] == "answer" and "labels" in own.data


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (lambda at: "nan" if at == 5 else f"{at}.5", "line 7: score is nan"),
        (lambda at: float("inf") if at == 5 else at + 0.5, "line 7: score is inf"),
        (lambda at: "" if at == 5 else f"{at}.5", "'score' is empty in 1 of 40 rows, first in line 7"),
        (lambda at: "much" if at == 5 else f"{at}.5", "holds numbers such as 0.5"),
        (lambda _: "2.5", "column 'score' is 2.5 in every row"),
        (lambda at: f"{at % 2}.0", "'score' holds 0.0 and 1.0: classes, written with a point"),
    ],
)
def test_numbers_that_cannot_be_learned(tmp_path: Path, score: Any, said: str) -> None:
    with pytest.raises(DataError) as caught:
        found(tmp_path, rated(score), {"label": "score"}, needs=NUMBERS)
    assert said in f"{caught.value.doing}: {caught.value.found}".replace(f"reading {tmp_path}/rows.csv, ", "")
