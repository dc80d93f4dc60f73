"""Whole imports of each format: what is written, what is refused and what is left out, to the letter."""

import json
from pathlib import Path

import pytest

import dryfit
from dryfit.study.import_formats import hub_rows
from dryfit.study.import_options import ColumnMap, Format
from golden import Golden, refusal
from import_files import ANNOTATIONS, COLA, CRITERIA, POSTS, RTE, contract, contractnli, squad, write_json, write_text

NONE = {key: ("NotMentioned", []) for key in ("nda-1", "nda-2", "nda-3")}


def contracts() -> dict:
    """Contracts of which most have a fault of their own."""
    found = [contract(number) for number in range(14)]
    found[1] |= {"text": 3}
    found[2]["spans"][1] = [5]
    found[3]["spans"][0] = [0, 10_000]
    found[4]["annotation_sets"] = []
    found[5]["annotation_sets"][0]["annotations"] |= {"nda-1": {"choice": "Perhaps", "spans": []}, "nda-9": {}}
    found[6]["annotation_sets"][0]["annotations"] = {"nda-2": {"choice": "Entailment", "spans": [5]}}
    found[7]["annotation_sets"] *= 2
    found[8]["id"] = 7
    found[9]["spans"][3] = [found[9]["spans"][3][0] - 1] * 2
    found[10] = contract(10, {**NONE, "nda-1": ("Contradiction", [2, 3, 0])})
    found[11]["id"] = 1.5
    found[12] = contract(12, {**NONE, "nda-1": ("Entailment", [])})
    found[13] = contract(13, {**NONE, "nda-1": ("Entailment", ["1"])})
    document = contractnli(*found, "a contract", contract(15, {**NONE, "nda-2": ("NotMentioned", [1])}))
    document["labels"]["nda-8"] = {"hypothesis": None}
    return document


def articles() -> dict:
    """Articles of which most have a fault of their own."""
    document = squad(12)
    data = document["data"]
    questions = [article["paragraphs"][0]["qas"] for article in data]
    questions[0][0]["answers"][1] |= {"answer_start": 3}
    questions[0][1] |= {"is_impossible": False}
    questions[1][0] |= {"is_impossible": True}
    questions[1][1] |= {"id": "q0-b"}
    questions[2][0]["answers"] = [{"text": "Paris", "answer_start": 3}]
    questions[2][1]["question"] = None
    questions[3][0]["answers"] = [{"text": "10th"}, "10th"]
    data[4]["paragraphs"].append({"context": "x"})
    data[5] = {"title": 5}
    data[6]["title"] = " "
    del data[7]["title"], questions[7][0]["is_impossible"]
    questions[8][0]["answers"] = [{"text": "Rouen", "answer_start": -6}]
    questions[8][1] |= {"is_impossible": "false"}
    questions[9][0]["answers"] = [{"text": "", "answer_start": 3}]
    questions[9][1] |= {"id": 5}
    questions[10][0]["answers"] = [{"text": "10th", "answer_start": 1e9}]
    questions[10][1]["answers"] = "10th"
    data[11] = "Normans"
    return document


POSTS_MORE = f"{POSTS},no id\ns_4_1,again\ns_5_1\n"
NOTES_MORE = f"""{ANNOTATIONS}s_1_1,s_1_1_9,I am awake.,FATIGUE,1,x
s_4_1,s_4_1_1,Nothing here.,FATIGUE,2,x
s_4_1,s_4_1_1,Nothing here.,FATIGUE,0,x
s_2_1,s_2_1_1,"I slept well, and ate.",SLEEP_ISSUES,0,x
s_3_1,s_3_1_1,,SLEEP_ISSUES,1,x
s_9_1,s_9_1_1,Gone.,FATIGUE,1,x
s_1_1,s_1_1_1,I am tired every day.,SPECIAL_CASE,1,x
s_1_1,s_1_1_1
"""
BY_SENTENCE = (
    "post_id,sentence_id,sentence_text\np,1,One is here.\nq,1,Other.\np,2, Two is  tired. \np,1,Three.\nq,, \n"
)
NOTES_BY_SENTENCE = (
    f"{ANNOTATIONS.splitlines()[0]}\np,2,Two is tired.,FATIGUE,1,\nq,1,Another.,FATIGUE,1,\nq,7,x,FATIGUE,1,\n"
)
TABLE = f'{RTE}9\tone\ttwo\n\n9\tone\ttwo\tmaybe\n9\to\tt\te\tl\n4\t \t"\tentailment\n'


def imported(folder: Path, form: Format | str, *sources: Path, out: str, **options) -> list[str]:
    """The whole of an import: its summary, its notes and each line of its files."""
    notes: list[str] = []
    summary = dryfit.import_rows(form, *sources, out=folder / out, on_note=notes.append, **options)
    files = sorted((folder / out).iterdir() if (folder / out).is_dir() else folder.glob(f"{Path(out).stem}.*jsonl"))
    lines = [line for file in files for line in [file.name, *file.read_text("utf-8").splitlines()]]
    return [one.replace(f"{folder}/", "") for one in [summary.model_dump_json(), *notes, *lines]]


def test_contracts(tmp_path: Path, golden: Golden) -> None:
    source = write_json(tmp_path / "dev.json", contracts())
    golden(
        "import",
        imported(tmp_path, "contractnli", source, out="rows.jsonl"),
        imported(
            tmp_path, "contractnli", source, out="all", passage_chars=60, negatives="all", validation=0.4, test=0.2
        ),
    )


def test_articles(tmp_path: Path, golden: Golden) -> None:
    source = write_json(tmp_path / "dev.json", articles())
    golden("import", imported(tmp_path, "squad", source, out="rows.jsonl"))


@pytest.mark.parametrize("posts", ["whole", "sentences"])
def test_posts(tmp_path: Path, golden: Golden, posts: str) -> None:
    texts = (POSTS_MORE, NOTES_MORE) if posts == "whole" else (BY_SENTENCE, NOTES_BY_SENTENCE)
    files = [write_text(tmp_path / name, text) for name, text in zip(("posts.csv", "notes.csv"), texts, strict=True)]
    criteria = write_text(tmp_path / "criteria.txt", CRITERIA)
    golden(
        "import",
        imported(tmp_path, "redsm5", *files, out="rows.jsonl", criteria=criteria),
        imported(tmp_path, "redsm5", *files, out="few.jsonl", criteria=criteria, negatives=1),
    )


def test_tables(tmp_path: Path, golden: Golden) -> None:
    columns = {"criterion": "sentence2", "text": "sentence1", "label": "label"}
    classes = ["not_entailment", "entailment"]
    path = tmp_path / "RTE.tsv"
    path.write_bytes(TABLE.encode() + b"9\t\xff\ttwo\tentailment\n")
    cola = write_text(tmp_path / "CoLA.tsv", COLA)
    golden(
        "import",
        imported(tmp_path, "glue", path, out="rte.jsonl", columns=columns, labels=classes),
        imported(tmp_path, "glue", cola, out="cola.jsonl", columns={"text": "4", "label": "2"}, header=False),
    )


def test_rows_of_the_hub(golden: Golden) -> None:
    good = {"text": "t", "label": 1, "spans": [[1, 2], [0, 1]], "name": 7}
    cases = [good, good | {"text": None}, good | {"label": "1"}, good | {"spans": "[[0, 1]]"}, good | {"spans": [3]}]
    lines = [json.dumps({"row": row, "values": values}) for row, values in enumerate(cases)]
    columns = ColumnMap({"text": "text", "label": "label", "evidence": "spans"})
    rows = hub_rows([*lines, json.dumps({"row": 9, "error": "no column"})], columns, "some/set", "set:train")
    golden("import", [repr(row) for row in rows])


def test_refusals(tmp_path: Path, golden: Golden) -> None:
    """Of whole imports: each for its own reason."""
    wrong = write_json(tmp_path / "wrong.json", {"rows": []})
    other, contract_file = write_json(tmp_path / "s.json", squad()), write_json(tmp_path / "c.json", contractnli())
    broken, empty = write_text(tmp_path / "b.json", '{"data": ['), write_text(tmp_path / "e.csv", "")
    posts, notes = write_text(tmp_path / "p.csv", POSTS), write_text(tmp_path / "n.csv", ANNOTATIONS)
    bad, rules = write_text(tmp_path / "bad.txt", "FATIGUE"), write_text(tmp_path / "rules.txt", CRITERIA)
    table = write_text(tmp_path / "t.tsv", RTE)
    semicolons, open_quote = write_text(tmp_path / "o.csv", "post_id;x\n"), write_text(tmp_path / "q.csv", 'post_id\n"')
    columns = {"text": "sentence1", "label": "label"}
    cases: list[tuple[str, tuple, dict]] = [
        ("csv", (posts,), {}),
        ("squad", (), {}),
        ("squad", (other, wrong), {}),
        ("squad", (other,), {"negatives": 1}),
        ("squad", (wrong,), {}),
        ("squad", (contract_file,), {}),
        ("squad", (broken,), {}),
        ("squad", (empty,), {}),
        ("contractnli", (other,), {}),
        ("contractnli", (other,), {"passage_chars": 0}),
        ("contractnli", (contract_file,), {"negatives": "many"}),
        ("contractnli", (contract_file,), {"validation": 0.5}),
        ("contractnli", (contract_file,), {}),
        ("redsm5", (posts,), {}),
        ("redsm5", (posts, notes), {}),
        ("redsm5", (posts, notes), {"criteria": bad}),
        ("redsm5", (semicolons, notes), {"criteria": rules}),
        ("redsm5", (open_quote, notes), {"criteria": rules}),
        ("redsm5", (empty, notes), {"criteria": rules}),
        ("redsm5", (posts, posts), {"criteria": rules}),
        ("glue", (table,), {}),
        ("glue", (table,), {"columns": {"words": "sentence1"}}),
        ("glue", (table,), {"columns": columns, "labels": ["a", "a"]}),
        ("glue", (table,), {"columns": columns, "negatives": 1}),
        ("glue", (table,), {"columns": columns | {"text": "premise"}}),
        ("glue", (table,), {"columns": columns}),
        ("glue", (empty,), {"columns": columns}),
    ]
    target = tmp_path / "x.jsonl"
    told = [refusal(dryfit.import_rows, form, *given, out=target, **named) for form, given, named in cases]
    golden("import", [one.replace(f"{tmp_path}/", "").replace(str(tmp_path), "HERE") for one in told])
