"""The report's sections on trained models: their tables and figures, and what is said of a damaged file."""

import json
import os
from pathlib import Path

import numpy as np

from dryfit.documents.finals import final_sections
from dryfit.documents.pages import Section
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.training_messages import ANALYSIS_FILE, Analysis
from dryfit.tasks.analysis import analyse
from dryfit.tasks.scored_rows import RowFacts, ScoredRow


def written(folder: Path, name: str, text: str, at_s: int) -> None:
    file = StudyLayout(folder).final(name).model / ANALYSIS_FILE
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    os.utime(file, (at_s, at_s))


def both_parts() -> Analysis:
    """Rows with a class and a span each."""
    rng = np.random.default_rng(2)
    rows = [
        ScoredRow(
            f"r{at}<b>\x1b",
            {"class": int(at % 3 > 0), "span": [[2, 5]] if at % 3 else []},
            {"class": int(p > 0.4), "span": [2, 4] if p > 0.5 else None},
            (float(1 - p), float(p)),
            {"loss": float(-np.log(p)), "token_f1": 0.8 if p > 0.5 and at % 3 else float(p <= 0.5 and not at % 3)},
        )
        for at, p in enumerate(rng.uniform(0.1, 0.9, 60))
    ]
    facts = {row.id: RowFacts(f"person {at % 5}", f"Is it {at % 2}?") for at, row in enumerate(rows)}
    found = analyse(rows, facts, split="validation", metric="mcc", thresholds=(0.4,))
    assert found is not None
    return found


def table(section: Section, caption: str) -> list[tuple[str, ...]]:
    (found,) = [table for name, table in section.tables if name == caption]
    return [found.heads, *found.rows]


def test_a_model_has_tables_and_figures(tmp_path: Path) -> None:
    analysis = both_parts()
    written(tmp_path, "trial-0003-seed-7", analysis.model_dump_json(), 1)
    (section,) = final_sections(StudyLayout(tmp_path))
    assert section.title == "Trained model trial-0003-seed-7"
    (text,) = section.texts
    assert text.startswith("What it does well and badly on 60 rows of validation, by which its weights were chosen")
    assert analysis.classes is not None and analysis.spans is not None
    assert [row[0] for row in table(section, "By criterion")] == ["criterion", "Is it 0?", "Is it 1?"]
    assert len(table(section, "By group")) == 6
    assert table(section, "Confusion")[1:] == [
        (str(label), *map(str, counts)) for label, counts in enumerate(analysis.classes.confusion)
    ]
    assert table(section, "Rows with and without a span")[1:] == [
        ("has a span", str(analysis.spans.found), str(analysis.spans.missed)),
        ("has none", str(analysis.spans.invented), str(analysis.spans.left)),
    ]
    worst = [found.rows for name, found in section.tables if name == "Worst rows"]
    assert [rows[0][0] for rows in worst] == [
        f"{part.worst[0].id[:-1]}\\x1b" for part in (analysis.classes, analysis.spans)
    ]
    reliability, curve = section.charts
    assert sum(reliability["data"][1]["customdata"]) == 60
    point = curve["data"][1]
    assert (point["x"], point["y"]) == ([analysis.classes.curves[0].recall], [analysis.classes.curves[0].precision])
    assert "0.4000" in point["name"]
    json.dumps(section.charts, allow_nan=False)


def test_the_newest_models_are_shown_and_a_damaged_file_says_so(tmp_path: Path) -> None:
    assert final_sections(StudyLayout(tmp_path)) == []
    good = both_parts().model_dump_json()
    for number in range(4):
        written(tmp_path, f"trial-{number}", good if number != 2 else '{"v": 1', number)
    (tmp_path / "final" / "scores-only").mkdir()
    sections = final_sections(StudyLayout(tmp_path))
    assert [section.title[-1] for section in sections] == ["3", "2", "1"]
    assert sections[1].warnings == ("analysis.json cannot be read: ValidationError.",)
    assert len({section.anchor for section in sections}) == 3
