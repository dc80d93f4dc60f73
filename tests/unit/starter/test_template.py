import tomllib

import pytest

from dryfit.settings.choices import BuiltInTask
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file_reading import load_study_file
from dryfit.settings.study_file_text import TABLES
from dryfit.settings.task_facts import reads
from dryfit.study.template import SplitSizes, init_folder, study_toml

SMALL = SplitSizes(train=20, validation=8, test=8)


def test_a_new_folder_holds_a_study_that_loads(tmp_path):
    folder = tmp_path / "my study"
    written = init_folder(folder, sizes=SMALL)
    assert [path.relative_to(folder).as_posix() for path in written] == [
        "study.toml", "data/train.jsonl", "data/validation.jsonl", "data/test.jsonl",
    ]  # fmt: skip
    study = load_study_file(folder)
    assert study.config.study.name == "my-study"
    assert study.config.data.train == str(folder / "data/train.jsonl")
    assert study.config.study.trials >= 6
    assert "optim.lr" in study.config.space
    assert any(case.when for cases in study.config.space.values() for case in cases)
    assert len((folder / "data/train.jsonl").read_text("utf-8").splitlines()) == 20


def test_a_study_of_evidence_sets_what_its_task_reads(tmp_path):
    init_folder(tmp_path, task=BuiltInTask.EVIDENCE, sizes=SMALL)
    config = load_study_file(tmp_path).config
    assert (config.study.task, config.study.metric) == ("evidence", "span_balanced")
    text = (tmp_path / "study.toml").read_text("utf-8")
    tables = tomllib.loads(text)
    assert not {"num_labels", "pooling"} & (tables["data"].keys() | tables["head"].keys())
    assert tables["loss"].keys() == {"name"}
    assert config.span.doc_stride == 32
    assert "span.negatives" in config.space
    shown = text.replace("# null_threshold =", "null_threshold =").replace("# negatives =", "negatives =")
    (tmp_path / "study.toml").write_text(shown.replace('"calibrated"', '"threshold"'), encoding="utf-8")
    assert load_study_file(tmp_path).config.span.negatives == 3.0


def test_nothing_is_overwritten_without_force(tmp_path):
    init_folder(tmp_path, sizes=SMALL)
    before = (tmp_path / "data/train.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="exists") as caught:
        init_folder(tmp_path, sizes=SMALL, seed=2)
    assert "--force" in caught.value.hint
    assert (tmp_path / "data/train.jsonl").read_bytes() == before
    init_folder(tmp_path, sizes=SMALL, seed=2, force=True)
    assert (tmp_path / "data/train.jsonl").read_bytes() != before


def test_every_table_is_there_and_what_is_commented_out_is_legal_too(tmp_path):
    text = study_toml(BuiltInTask.CRITERIA, "x")
    # What is not there is read by other tasks alone; [nodes] makes a study listen by being there.
    read = {table for table in TABLES if reads(BuiltInTask.CRITERIA, table)} - {
        "objective",
        "trainer",
        "script",
        "nodes",
    }
    assert set(tomllib.loads(text)) == {"space", *read}
    assert max(map(len, text.splitlines())) <= 120
    lines = text.splitlines()
    hidden = [line for line in lines if line.startswith("# ") and " = " in line.split("  #")[0]]
    keys = {key for names in TABLES.values() for key in names}
    hidden = [line for line in hidden if line[2:].split(" = ")[0] in keys]
    assert len(hidden) > 5
    shown = "\n".join(line[2:] if line in hidden else line for line in lines)
    (tmp_path / "study.toml").write_text(shown, encoding="utf-8")
    config = load_study_file(tmp_path).config
    assert config.study.max_hours == 1.5
    assert config.runtime.trial_timeout_s == 3600


@pytest.mark.parametrize(("folder", "name"), [("été 1", "t--1"), ("...", "study"), ("a" * 150, "a" * 100)])
def test_any_folder_gives_a_legal_name(tmp_path, folder, name):
    target = tmp_path / "x" / folder if folder != "..." else tmp_path / "___"
    init_folder(target, sizes=SMALL)
    assert load_study_file(target).config.study.name == name
