"""Whatever ends a training says which rows it was at, with ids and ranges and without a word of text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import trials
from dryfit.processes.child import describe_fault
from dryfit.settings.wire import Note
from dryfit.tasks.heads import EncoderWithHead
from dryfit.training import trainer as loop
from dryfit.training.trial_jobs import train


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("told"))


def told(error: BaseException, trial: trials.Trial) -> list[str]:
    """The lines of the context, once no text of a row is seen to be in it."""
    context = describe_fault(error).context
    files = [Path(str(name)) for name in (trial.data.train, trial.data.validation)]
    texts = [json.loads(line)["text"] for file in files for line in file.read_text("utf-8").splitlines()]
    assert not [text for text in texts if " ".join(text.split()[:2]) in context]
    return context.splitlines()


def spoil(monkeypatch: pytest.MonkeyPatch, training: bool, at: int) -> None:
    """From the third training batch on, or from the first other one, the ids of a row have no embedding."""
    forward, count = EncoderWithHead.forward, [0]

    def spoiled(self: EncoderWithHead, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        if self.training is training:
            count[0] += 1
            if count[0] >= at:
                input_ids = input_ids + 10_000
        return forward(self, input_ids, **inputs)

    monkeypatch.setattr(EncoderWithHead, "forward", spoiled)


def test_an_error_in_a_micro_batch_is_told_with_its_rows(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trials.small(tmp_path, encoder=encoder, execution={"micro_batch": 3})
    trial.params = {"optim.lr": 0.002}
    spoil(monkeypatch, True, at=5)  # the second micro-batch of the second step
    seen: list[list[int]] = []
    rows = loop.TrialTrainer._rows
    monkeypatch.setattr(loop.TrialTrainer, "_rows", lambda self: seen.append(rows(self)) or seen[-1])
    with pytest.raises(IndexError) as caught:
        trial.run()
    lines = told(caught.value, trial)
    assert lines[0] == "at optimizer step 2 of 10, micro-batch 2 of 3"
    named = ", ".join(f"r{row}" for row in seen[-1][3:6])
    assert lines[1] == f"batch of the split train: 3 row(s): {named}"
    shape = r"labels [01] to [01] of 2 classes, token ids 0 to \d+ of 96 in the embedding, \d+ to \d+ tokens in a row"
    assert re.fullmatch(shape, lines[2])
    assert lines[3:] == ["trial 0: optim.lr = 0.002", "on cpu in fp32, 8 rows a step, 3 at once, seed 3"]


def test_an_error_in_a_validation_is_told_with_its_rows(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trials.small(tmp_path, encoder=encoder)
    spoil(monkeypatch, False, at=1)
    with pytest.raises(IndexError) as caught:
        trial.run()
    lines = told(caught.value, trial)
    assert lines[0] == "at optimizer step 5 of 10"
    assert lines[1].startswith("batch of the split validation: 20 row(s): r")


def test_between_two_batches_no_batch_is_named(tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trials.small(tmp_path, encoder=encoder)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dryfit.training.trainer.save_trained", full)
    with pytest.raises(OSError, match="No space") as caught:
        trial.run()
    assert [line for line in told(caught.value, trial) if "batch of" in line] == []


def test_a_note_that_cannot_be_made_leaves_the_error_as_it_is(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trials.small(tmp_path, encoder=encoder)
    spoil(monkeypatch, True, at=1)
    trial.resolve()

    def gone(*_: object) -> tuple[str, ...]:
        raise OSError("the file with the ids is gone")

    monkeypatch.setattr("dryfit.tasks.tokens.TokenSet.names_of", gone)
    with pytest.raises(IndexError) as caught:
        trial.run()
    assert describe_fault(caught.value).context == ""


@pytest.mark.slow
def test_a_diagnostic_attempt_that_does_not_fail_is_the_trial(tmp_path: Path, encoder: Path) -> None:
    want, plain = trials.small(tmp_path / "plain", encoder=encoder).run()
    trial = trials.small(tmp_path / "slow", encoder=encoder)
    channel = trials.ScriptedChannel(tmp_path / "channel")
    have = train(trial.request().model_copy(update={"diagnostic": True}), channel)
    assert have.model_copy(update={"peak_rss_bytes": None}) == want
    assert channel.points == plain.points
    notes = [message.text for message in channel.messages() if isinstance(message, Note)]
    assert [note.split(":")[0].split(",")[0] for note in notes] == [
        "every kernel is waited for",
        "what ended the attempt before did not come back",
    ]


@pytest.mark.slow
def test_tensors_shared_by_name_change_nothing(tmp_path: Path, encoder: Path) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    execution = {"loader_workers": 2}
    want, plain = trials.small(tmp_path / "plain", encoder=encoder, execution=execution).run()
    trial = trials.small(tmp_path / "named", encoder=encoder, execution=execution)
    channel = trials.ScriptedChannel(tmp_path / "channel")
    try:
        have = train(trial.request().model_copy(update={"file_sharing": True}), channel)
        assert torch.multiprocessing.get_sharing_strategy() == "file_system"
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    assert have.model_copy(update={"peak_rss_bytes": None}) == want
    assert channel.points == plain.points
