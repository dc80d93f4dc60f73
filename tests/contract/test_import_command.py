"""`dryfit import` as a user meets it: files in, rows that a study takes out, and every fault told."""

import csv
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import dryfit
import import_files
import tiny
from dryfit.documents.command_line import main
from dryfit.settings.errors import DataError, MachineError
from dryfit.settings.tables import DataSettings
from dryfit.study.import_options import Format
from dryfit.tasks.rows import Splits, load_splits
from study_runs import run_here

MAPS = {
    Format.GLUE: {
        "columns": {"criterion": "sentence2", "text": "sentence1", "label": "label"},
        "labels": ["not_entailment", "entailment"],
    },
}


def sources(folder: Path, form: Format) -> list[Path]:
    """A small data set of a format, with enough groups for two splits."""
    match form:
        case Format.CONTRACTNLI:
            document = import_files.contractnli(*(import_files.contract(number) for number in range(8)))
            return [import_files.write_json(folder / "dev.json", document)]
        case Format.SQUAD:
            return [import_files.write_json(folder / "dev-v2.0.json", import_files.squad(8))]
        case Format.REDSM5:
            return [
                import_files.write_text(folder / "posts.csv", import_files.POSTS),
                import_files.write_text(folder / "annotations.csv", import_files.ANNOTATIONS),
            ]
        case Format.GLUE:
            return [import_files.write_text(folder / "RTE.tsv", import_files.RTE)]
        case Format.HUB:
            raise AssertionError("see the tests of the hub")


def options_of(folder: Path, form: Format) -> dict:
    if form is Format.REDSM5:
        return {"criteria": import_files.write_text(folder / "criteria.txt", import_files.CRITERIA)}
    return MAPS.get(form, {})


def ids(splits: Splits) -> dict[str, list[str]]:
    return {name: [row.id for row in rows] for name, rows in splits.items()}


@pytest.mark.parametrize("form", [form for form in Format if form is not Format.HUB])
def test_a_study_takes_the_rows_and_splits_them_as_the_import_does(tmp_path: Path, form: Format) -> None:
    """One file that a study splits, and a folder that the import splits: the same rows in the same splits."""
    given, options = sources(tmp_path, form), options_of(tmp_path, form)
    whole = dryfit.import_rows(form, *given, out=tmp_path / "rows.jsonl", **options)
    parts = dryfit.import_rows(form, *given, out=tmp_path / "data", validation=0.5, split_seed=4, **options)
    assert whole.rows == parts.rows > 3 and not whole.rejected and whole.left_out == parts.left_out
    rule = {"validation_fraction": 0.5, "split_seed": 4}
    required = frozenset({"label", "criterion"} | ({"evidence"} if form is not Format.GLUE else set()))
    by_study = load_splits(DataSettings(file=str(tmp_path / "rows.jsonl"), **rule), required)
    by_import = load_splits(
        DataSettings(train=f"{tmp_path}/data/train.jsonl", validation=f"{tmp_path}/data/validation.jsonl"), required
    )
    assert ids(by_study) == ids(by_import)
    assert {name: len(rows) for name, rows in by_import.items()} == {
        Path(one.file).stem: one.rows for one in parts.files
    }
    evidence = [row.text[start:end] for rows in by_import.values() for row in rows for start, end in row.evidence]
    assert all(evidence) and bool(evidence) is (form is not Format.GLUE)


@dataclass
class Done:
    """How the command ended."""

    status: int
    out: str
    err: str


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command, without a new interpreter for each."""

    def command(*words: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["dryfit", "import", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return command


def test_the_command_prints_what_it_did(tmp_path: Path, imported: Callable[..., Done]) -> None:
    (source,) = sources(tmp_path, Format.CONTRACTNLI)
    done = imported("contractnli", source, "--out", tmp_path / "data", "--test", "0.2", "--passage-chars", "60")
    assert (done.status, done.err) == (0, "")
    first, second, third, last = done.out.splitlines()
    assert first == f"{tmp_path}/data/train.jsonl: 20 rows in 4 groups; 12 of label 0, 8 of label 1"
    assert second.startswith(f"{tmp_path}/data/validation.jsonl: 10 rows in 2 groups")
    assert third.startswith(f"{tmp_path}/data/test.jsonl: 10 rows in 2 groups")
    assert last == "left out: 32 rows with label 0 (--negatives)"
    again = imported("contractnli", source, "--out", tmp_path / "data")
    assert again.status == 2 and "is there already" in again.err and "--force" in again.err
    forced = imported("contractnli", source, "--out", tmp_path / "data", "--force", "--json")
    told = json.loads(forced.out)
    assert [Path(one["file"]).name for one in told["files"]] == ["train.jsonl", "validation.jsonl"]
    assert sorted(os.listdir(tmp_path / "data")) == ["train.jsonl", "validation.jsonl"]


def test_what_does_not_fit_is_told_and_makes_the_exit_status_1(tmp_path: Path, imported: Callable[..., Done]) -> None:
    document = import_files.squad(2)
    document["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = 0
    source = import_files.write_json(tmp_path / "dev.json", document)
    done = imported("squad", source, "--out", tmp_path / "a.jsonl")
    place = f"{source}, data[0].paragraphs[0].qas[0].answers[0]"
    assert done.status == 1 and place in done.err
    assert done.out.splitlines() == [
        f"{tmp_path}/a.jsonl: 3 rows in 2 groups; 2 of label 0, 1 of label 1",
        f"1 do not fit: {tmp_path}/a.rejected.jsonl",
    ]
    (line,) = (tmp_path / "a.rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["place"] == place
    allowed = imported("squad", source, "--out", tmp_path / "a.jsonl", "--force", "--allow-bad", "--json", "-q")
    assert (allowed.status, allowed.err) == (0, "")
    told = json.loads(allowed.out)
    assert (told["format"], told["rejected"], told["rejected_file"]) == ("squad", 1, f"{tmp_path}/a.rejected.jsonl")
    assert told["files"] == [
        {"v": 1, "file": f"{tmp_path}/a.jsonl", "rows": 3, "groups": 2, "labels": {"0": 2, "1": 1}}
    ]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["squad", "none.json", "-o", "x.jsonl"], "there is no such file"),
        (["squad", "near.jsn", "-o", "x.jsonl"], "did you mean near.json?"),
        (["squad", ".", "-o", "x.jsonl"], "it is a folder"),
        (["squad", "near.json", "-o", "x.csv"], "of kind '.csv'"),
        (["squad", "near.json", "-o", "x.jsonl", "--no-header", "--labels", "a"], "it does not read header, labels"),
        (["squad", "near.json", "-o", "x.jsonl", "--test", "0.1"], "test with a file as target"),
        (["squad", "near.json", "-o", "x", "--test", "1.5"], "test is 1.5"),
        (["contractnli", "near.json", "-o", "x", "--negatives", "0"], "negatives is 0"),
        (["glue", "a.tsv", "-o", "x", "--map", "text=a"], "no column for label"),
        (["glue", "a.tsv", "-o", "x", "--map", "text"], "--map text"),
        (["glue", "a.tsv", "-o", "x", "--map", "text=a", "--map", "text=b"], "--map text=b beside text=a"),
        (["glue", "a.tsv", "-o", "x", "--map", "text=a", "--map", "label=b", "--labels", "a, a"], "there twice: a, a"),
        (["glue", "a.tsv", "-o", "x", "--map", "text=a", "--map", "label=b"], "there is no such file"),
        (["jsonl", "a.json", "-o", "x"], "jsonl"),
    ],
)
def test_what_cannot_run_ends_with_2_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: Callable[..., Done], words: list[str], found: str
) -> None:
    import_files.write_json(tmp_path / "near.json", {})
    monkeypatch.chdir(tmp_path)
    done = imported(*words)
    assert done.status == 2 and found in done.err
    assert os.listdir(tmp_path) == ["near.json"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"data": [}', "line 1, column 11: not JSON"),
        (b'{"data":\n\n[] [', "line 3, column 4: not JSON"),
        (b'{"data": "\xff"}', "byte 0xff at position 10 is not UTF-8"),
        (b'{"data": ' + b"9" * 5000 + b"}", "value has 5000 digits"),
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b"[]", "it is no object, but of type list"),
    ],
)
def test_a_file_that_is_no_json(tmp_path: Path, content: bytes, found: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=found):
        dryfit.import_rows("squad", tmp_path / "a.json", out=tmp_path / "x.jsonl")
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    source = import_files.write_json(tmp_path / "a.json", import_files.squad(1))
    with pytest.raises(MachineError, match="a.json") as caught:
        dryfit.import_rows("squad", source, out=source / "x.jsonl")
    assert caught.value.exit_status == 2 and os.listdir(tmp_path) == ["a.json"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set as the hub has it, on disk, with labels that have names."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = tiny.rows(12)
    for split, some in {"train": rows[:8], "test": rows[8:]}.items():
        named = [{"body": row["text"], "who": row["group"], "kind": ("no", "yes")[row["label"]]} for row in some]
        (tmp_path / "set").mkdir(exist_ok=True)
        with (tmp_path / "set" / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["body", "who", "kind"])
            writer.writeheader()
            writer.writerows([*named, {"body": "x", "who": "z", "kind": "maybe"}])
    return tmp_path / "set"


HUB_MAP = ["--map", "text=body", "--map", "label=kind", "--map", "group=who", "--labels", "no,yes"]


def test_a_data_set_of_the_hub_is_read_in_a_process_of_its_own(tmp_path: Path, hub: Path) -> None:
    done = run_here("import", "hub", f"{hub}:test", *HUB_MAP, "--out", tmp_path / "a.jsonl")
    assert done.returncode == 1, done.stderr
    assert f"{hub}:test, row 4: label is 'maybe', none of no, yes" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    expected = tiny.rows(12)[8:]
    assert [(row["text"], row["label"], row["group"]) for row in rows] == [
        (row["text"], row["label"], row["group"]) for row in expected
    ]
    assert rows[0]["id"] == "set:test:0"


def test_a_data_set_of_the_hub_without_the_column(tmp_path: Path, hub: Path) -> None:
    with pytest.raises(DataError, match="there is no column 'text'") as caught:
        dryfit.import_rows("hub", hub, out=tmp_path / "a", columns={"text": "text", "label": "kind"})
    assert "body, who, kind" in caught.value.allowed
    assert not (tmp_path / "a").exists()
