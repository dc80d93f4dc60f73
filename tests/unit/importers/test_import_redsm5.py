from pathlib import Path

import pytest

from dryfit.settings.errors import DataError
from dryfit.study.import_formats import (
    ANNOTATION_COLUMNS,
    POST_COLUMNS,
    ImportedRow,
    LeftOut,
    csv_records,
    read_criteria,
    redsm5_rows,
)
from import_files import ANNOTATIONS, CRITERIA, POSTS, write_text

HEADER = ANNOTATIONS.splitlines()[0]


def items_of(folder: Path, *, posts=POSTS, annotations=ANNOTATIONS, negatives=None):
    files = write_text(folder / "posts.csv", posts), write_text(folder / "notes.csv", annotations)
    return list(
        redsm5_rows(
            csv_records(str(files[0]), POST_COLUMNS),
            csv_records(str(files[1]), ANNOTATION_COLUMNS),
            read_criteria(CRITERIA.splitlines(), "criteria.txt"),
            negatives,
        )
    )


def told(items) -> dict[str, tuple[int, list[str]]]:
    rows = [item for item in items if isinstance(item, ImportedRow)]
    return {row.id: (row.label, [row.text[start:end] for start, end in row.evidence]) for row in rows}


def test_explicit_negatives_are_kept_and_others_drawn(tmp_path: Path) -> None:
    found = told(items_of(tmp_path, negatives=1))
    assert found["s_2_1:SLEEP_ISSUES"] == (0, []) and "s_2_1:FATIGUE" in found
    four = [name for name in found if name.startswith("s_4_1")]
    assert len(four) == 1  # nothing was noted of it: one of its two symptoms
    left_out = [item.rows for item in items_of(tmp_path, negatives=1) if isinstance(item, LeftOut)]
    assert sum(left_out) == 8 - len(found)


def test_a_sentence_is_found_as_a_whole_before_it_is_found_inside_of_words(tmp_path: Path) -> None:
    posts = "post_id,text\np,Casino. No. No.\nq,我很累我睡不着\n"
    annotations = f"{HEADER}\np,1,no.,FATIGUE,0,\np,2,No.,FATIGUE,1,\nq,1,我睡不着,SLEEP_ISSUES,1,\n"
    rows = {row.id: row for row in items_of(tmp_path, posts=posts, annotations=annotations)}
    assert rows["p:FATIGUE"].evidence == ((8, 11),)
    assert rows["q:SLEEP_ISSUES"].evidence == ((3, 7),)


def test_posts_need_text_or_sentences(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="post_id, body") as caught:
        items_of(tmp_path, posts="post_id,body\np,One.\n")
    assert "sentence_text" in caught.value.allowed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "it names no symptom"),
        ("# nothing\n\n", "it names no symptom"),
        ("FATIGUE: a\nSLEEP", "line 2: 'SLEEP' names no symptom"),
        ("FATIGUE:", "names no symptom"),
        (": what", "names no symptom"),
        ("FATIGUE: a\n\nFATIGUE: b", "line 3: FATIGUE is there already"),
    ],
)
def test_criteria_that_cannot_be_read(text: str, found: str) -> None:
    with pytest.raises(DataError, match=found):
        read_criteria(text.split("\n"), "criteria.txt")


def test_criteria_may_hold_colons_and_tabs() -> None:
    lines = ["  FATIGUE : Loss: of energy  ", "\tSLEEP_ISSUES\ttoo little\tor too much"]
    assert read_criteria(lines, "c") == {"FATIGUE": "Loss: of energy", "SLEEP_ISSUES": "too little\tor too much"}
