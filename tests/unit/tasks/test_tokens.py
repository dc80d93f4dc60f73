import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tasks
import tiny
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.settings.errors import ChangedError, ConfigError, DataError, LoadError
from dryfit.settings.tables import DataSettings, ModelSettings
from dryfit.tasks.prepare import cache_tokens, prepared_tokens
from dryfit.tasks.rows import Splits, fingerprint, load_splits
from dryfit.tasks.tokens import load_tokens, save_tokens, token_folder

DATA = DataSettings()


def prepared(folder: Path) -> Splits:
    return load_splits(DataSettings(**tiny.data(folder)))


def test_tokens_are_the_tokenizers_own(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer(tmp_path)
    splits = prepared(tmp_path)
    tokens = tasks.criteria(max_length=20).tokenise(splits, tokenizer).splits["train"]
    for index, row in enumerate(splits["train"]):
        want = tokenizer(row.criterion, row.text, truncation="only_second", max_length=20)
        start, end = tokens.starts_R[index], tokens.starts_R[index + 1]
        assert tokens.ids_T[start:end].tolist() == want["input_ids"]
        assert tokens.types_T[start:end].tolist() == want["token_type_ids"]
    assert tokens.lengths_R.max() == 20
    assert tokens.labels_R.tolist() == [row.label for row in splits["train"]]


def test_text_alone(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer(tmp_path)
    splits = {name: tuple(replace(row, criterion=None) for row in rows) for name, rows in prepared(tmp_path).items()}
    tokens = tasks.criteria(max_length=12).tokenise(splits, tokenizer).splits["validation"]
    want = tokenizer(splits["validation"][0].text, truncation=True, max_length=12)["input_ids"]
    assert tokens.ids_T[: len(want)].tolist() == want


def test_a_criterion_without_room_for_text_is_named(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer(tmp_path)
    splits = prepared(tmp_path)
    rows = list(splits["train"])
    rows[4] = replace(rows[4], criterion="very " * 30)
    with pytest.raises(DataError, match="has 30 tokens") as caught:
        tasks.criteria(max_length=16).tokenise(splits | {"train": tuple(rows)}, tokenizer)
    assert "train.jsonl, line 5" in caught.value.doing
    assert "at most 12 " in caught.value.allowed


def test_cache_keeps_everything_and_no_text(tmp_path: Path) -> None:
    splits = prepared(tmp_path)
    tokens = tasks.criteria(max_length=20).tokenise(splits, tiny.tokenizer(tmp_path))
    folder = tmp_path / "cache" / "key"
    save_tokens(folder, tokens)
    save_tokens(folder, tokens)  # a second process with the same content
    found = load_tokens(folder)
    assert (found.pad_id, found.cls_last) == (tokens.pad_id, tokens.cls_last)
    for name, want in tokens.splits.items():
        have = found.splits[name]
        for field in ("ids_T", "types_T", "starts_R", "labels_R"):
            assert torch.equal(getattr(have, field), getattr(want, field)), (name, field)
    assert os.listdir(folder.parent) == ["key"]
    assert not any(b"sleep" in path.read_bytes() for path in folder.iterdir())
    assert load_tokens(tmp_path / "cache" / "other") is None
    assert set(load_tokens(folder, only=("train",)).splits) == {"train"}  # type: ignore[union-attr]


def test_a_half_written_cache_is_not_seen(tmp_path: Path) -> None:
    tokens = tasks.criteria(max_length=20).tokenise(prepared(tmp_path), tiny.tokenizer(tmp_path))
    folder = tmp_path / "cache" / "key"
    leftover = folder.with_name(".key.1.tmp")
    leftover.mkdir(parents=True)
    (leftover / "train.safetensors").write_bytes(b"half")
    assert load_tokens(folder) is None
    save_tokens(folder, tokens)
    assert load_tokens(folder) is not None


def test_key_depends_on_all_it_should(tmp_path: Path) -> None:
    base = {"data_fingerprint": "d", "identity": "m", "max_length": 16}
    keys = {token_folder(tmp_path, **(base | change)) for change in ({}, {"identity": "n"}, {"max_length": 17})}
    keys.add(token_folder(tmp_path, **(base | {"data_fingerprint": "e"})))
    assert len(keys) == 4


def test_prepared_tokens_come_from_the_cache_or_are_made_again(tmp_path: Path) -> None:
    model = ModelSettings(name=str(tiny.model(tmp_path / "model")))
    data = DataSettings(**tiny.data(tmp_path))
    splits = load_splits(data)
    found = fingerprint(splits)
    where = {"cache_dir": tmp_path / "cache", "data_fingerprint": found}
    made = cache_tokens(tasks.reading(data, model, 16), splits, **where)
    (tmp_path / "train.jsonl").rename(tmp_path / "away.jsonl")
    cached = prepared_tokens(tasks.reading(data, model, 16), **where, only=("train",))
    assert torch.equal(cached.splits["train"].ids_T, made.splits["train"].ids_T)
    (tmp_path / "away.jsonl").rename(tmp_path / "train.jsonl")
    again = prepared_tokens(tasks.reading(data, model, 17), **where, only=("train",))
    assert again.splits["train"].lengths_R.max() == 17
    tiny.write_jsonl(tmp_path / "train.jsonl", tiny.rows(40, seed=9))
    with pytest.raises(ChangedError, match="the rows have changed"):
        prepared_tokens(tasks.reading(data, model, 18), **where, only=("train",))


def test_length_beyond_the_models_positions(tmp_path: Path) -> None:
    splits = prepared(tmp_path)
    for architecture, limit in (("bert", 72), ("roberta", 71)):
        model = ModelSettings(name=str(tiny.model(tmp_path / architecture, architecture)))
        cache_tokens(tasks.reading(DATA, model, limit), splits, cache_dir=tmp_path / "cache", data_fingerprint="x")
        with pytest.raises(ConfigError, match=f"max_length is {limit + 1}") as caught:
            cache_tokens(
                tasks.reading(DATA, model, limit + 1), splits, cache_dir=tmp_path / "cache", data_fingerprint="x"
            )
        assert f"at most {limit}" in caught.value.allowed


def test_tokenizer_of_a_folder_without_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match="loading the tokenizer"):
        load_tokenizer(FolderSource(str(tmp_path / "empty")))


def test_ids_of_rows_are_kept_beside_the_tokens_and_read_for_messages_only(tmp_path: Path) -> None:
    tokens = tasks.criteria(max_length=20).tokenise(prepared(tmp_path), tiny.tokenizer(tmp_path))
    folder = tmp_path / "cache" / "key"
    save_tokens(folder, tokens)
    found = load_tokens(folder)
    assert tokens.splits["validation"].names_of([0, 19]) == ("r40", "r59")
    assert found.splits["validation"].names_of([0, 19]) == ("r40", "r59")
    assert found.splits["train"].names_of([39, 40, -1]) == ("r39", "row 40", "row -1")
    (folder / "train.row-ids.json").write_text("{ torn")
    assert found.splits["train"].names_of([3]) == ("row 3",)
    (folder / "train.row-ids.json").unlink()
    assert found.splits["train"].names_of([3]) == ("row 3",)
