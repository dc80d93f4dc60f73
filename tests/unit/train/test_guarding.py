"""Guards in a trial: what damages its cache, its batches or its model ends it with rows named and no text."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
import trials
from dryfit.processes.child import describe_fault
from dryfit.processes.failures import classify
from dryfit.settings.errors import ConfigError, DataError, Evidence, FailureKind
from dryfit.settings.jobs import ChildResult
from dryfit.tasks.base import Batch
from dryfit.tasks.classification import CriteriaTask
from dryfit.tasks.heads import EncoderWithHead
from dryfit.tasks.tokens import TokenSet

Damage = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("guarding"))


def words_of(trial: trials.Trial) -> set[str]:
    """Words of the rows' texts that no message uses by chance."""
    files = [Path(str(name)) for name in (trial.data.train, trial.data.validation)]
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["text"] for row in rows} | {" ".join(row["text"].split()[:2]) for row in rows}


def fault_of(trial: trials.Trial, error: Exception, kind: FailureKind) -> str:
    """All that crosses to the control process, once it is seen to be of that kind and to hold no text."""
    fault = describe_fault(error)
    failure = classify(Evidence(exit_code=1), ChildResult(fault=fault))
    assert failure.kind is kind
    said = "\n".join((fault.message, fault.traceback, failure.sentence))
    assert not [word for word in words_of(trial) if word in said]
    return failure.sentence


def damage_cache(trial: trials.Trial, split: str, name: str, at: int, value: int) -> None:
    (file,) = (trial.folder / "cache").glob(f"*/{split}.safetensors")
    tensors = load_file(file)
    tensors[name][at] = value
    save_file(tensors, file)


@pytest.mark.parametrize("split, row", [("train", "r3"), ("validation", "r43")])
@pytest.mark.parametrize("name, value, found", [("labels", 2, "label 2"), ("ids", 5_000, "token id 5000")])
def test_a_damaged_cache_ends_the_trial_before_its_first_step(
    tmp_path: Path, encoder: Path, split: str, row: str, name: str, value: int, found: str
) -> None:
    trial = trials.small(tmp_path, encoder=encoder)
    request = trial.request()
    (file,) = (trial.folder / "cache").glob(f"*/{split}.safetensors")
    damage_cache(trial, split, name, 3 if name == "labels" else int(load_file(file)["starts"][3]), value)
    channel = trials.ScriptedChannel(tmp_path / "attempt")
    with pytest.raises(DataError, match=f"{found} in 1 row: {row}") as caught:
        trials.train(request, channel)
    assert f"{found} in 1 row: {row}" in fault_of(trial, caught.value, FailureKind.DATA)
    assert not channel.points


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused_before_any_trial(tmp_path: Path) -> None:
    folder = tiny.model(tmp_path / "model")
    tokenizer = tiny.tokenizer(folder)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    trial = trials.small(tmp_path, encoder=folder)
    rows = tiny.rows(40)
    rows[7]["text"] += " zebra"
    tiny.write_jsonl(tmp_path / "data" / "train.jsonl", rows)
    with pytest.raises(DataError, match=r"token id \d+ in 1 row: r7") as caught:
        trial.resolve()
    assert "the model's embedding has" in caught.value.allowed and "added tokens" in caught.value.hint
    fault_of(trial, caught.value, FailureKind.DATA)


def spoil_collation(monkeypatch: pytest.MonkeyPatch, rows_seen: list[list[int]], count: int, at: int) -> None:
    """From the first batch of ``count`` rows on, row ``at`` of each batch gets a label that there is not."""
    collate = CriteriaTask.collate

    def spoiled(self: CriteriaTask, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        batch = collate(self, tokens, rows)
        if len(rows) == count:
            rows_seen.append(list(rows))
            if len(rows_seen) > 3:
                batch["labels"][at] = 9
        return batch

    monkeypatch.setattr(CriteriaTask, "collate", spoiled)


@pytest.mark.parametrize("count, split, first, begun", [(8, "train", 0, 7), (20, "validation", 40, 3)])
def test_a_damaged_batch_is_told_with_its_row(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch, count: int, split: str, first: int, begun: int
) -> None:
    trial = trials.small(tmp_path, encoder=encoder, execution={"micro_batch": 5}, train={"epochs": 4})
    rows_seen: list[list[int]] = []
    trial.run(stop_at=begun)
    spoil_collation(monkeypatch, rows_seen, count, 6)
    with pytest.raises(DataError, match="label 9 in 1 row: ") as caught:
        trial.run()
    assert caught.value.doing == f"checking a batch of the split {split}"
    # The training loader fetches ahead: the first spoiled batch is the fourth, whatever was fetched since.
    assert caught.value.found.endswith(f": r{first + rows_seen[3][6]}")
    fault_of(trial, caught.value, FailureKind.DATA)


@pytest.mark.parametrize("in_training, split", [(True, "train"), (False, "validation")])
def test_a_model_with_other_outputs_than_scores(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch, in_training: bool, split: str
) -> None:
    forward = EncoderWithHead.forward

    def sequence_first(self: EncoderWithHead, **inputs: torch.Tensor) -> torch.Tensor:
        scores = forward(self, **inputs)
        one_more = torch.cat([scores, scores[:1]])
        return one_more if self.training is in_training else scores

    monkeypatch.setattr(EncoderWithHead, "forward", sequence_first)
    trial = trials.small(tmp_path, encoder=encoder, execution={"micro_batch": 3})
    with pytest.raises(ConfigError, match=r"the model gives \(\d+, 2\) torch.float32 for (3|12|8) rows: r") as caught:
        trial.run()
    assert caught.value.doing == f"checking a batch of the split {split}"
    fault_of(trial, caught.value, FailureKind.CONFIG)
