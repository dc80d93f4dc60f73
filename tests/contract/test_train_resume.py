"""A stopped trial goes on as if it had never been stopped: equal reports, values and weights, bit for bit."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import tiny
import trials
from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import CheckpointError, CorruptCheckpointError, NonFiniteError
from dryfit.settings.training_messages import StopReason
from dryfit.settings.wire import STOP_FILE, FirstStep, Note, Phase, Progress
from dryfit.training.checkpoint import newest_good
from dryfit.training.trial_jobs import train
from parts import need_package
from trials import Undisturbed, same_weights

STEPS = 10
SPLITS = ("train", "validation")
TABLES = {
    "train": {"evals_per_epoch": 2, "group_by_length": True},
    "regularization": {"dropout": 0.2, "attention_dropout": 0.1},
    "head": {"dropout": 0.3, "layers": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Undisturbed:
    whole = trials.undisturbed(trials.small(tmp_path_factory.mktemp("whole"), encoder=model, **TABLES))
    assert [point.step for point in whole.points] == [3, 5, 8, 10]
    return whole


@pytest.mark.every(2)
@pytest.mark.parametrize("step", range(1, STEPS))
def test_stopped_at_any_step(tmp_path: Path, model: Path, undisturbed: Undisturbed, step: int) -> None:
    trials.assert_goes_on(trials.small(tmp_path, encoder=model, **TABLES), undisturbed, step)


def test_it_goes_on_from_another_place_if_it_is_the_trial_that_was_recorded(
    tmp_path: Path, model: Path, undisturbed: Undisturbed
) -> None:
    trial = trials.small(tmp_path, encoder=model, **TABLES)
    before, first = trial.request().config.fingerprint, trial.run(stop_at=4)[1]
    (tmp_path / "data").rename(tmp_path / "moved")
    places = {name: str(tmp_path / "moved" / Path(str(getattr(trial.data, name))).name) for name in SPLITS}
    trial.data = trial.data.model_copy(update=places)
    assert trial.request().config.fingerprint != before
    trial.fingerprint = "another trial"
    with pytest.raises(CheckpointError, match="belongs to a trial with fingerprint recorded"):
        trial.run()
    trial.fingerprint = "recorded"
    second, after = trial.run()
    assert first.points + after.points == undisturbed.points
    assert second == undisturbed.result


def test_a_stop_asked_for_at_the_last_step_comes_too_late(
    tmp_path: Path, model: Path, undisturbed: Undisturbed
) -> None:
    trial = trials.small(tmp_path, encoder=model, **TABLES)
    assert trial.run(stop_at=STEPS)[0] == undisturbed.result


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore")  # importing bitsandbytes warns of what it does itself
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "lion", "radam", "nadam", "adamw8bit"])
@pytest.mark.parametrize("step", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_other_optimizers_go_on_too(tmp_path: Path, model: Path, optimizer: str, step: int) -> None:
    if optimizer == "adamw8bit":
        need_package("bitsandbytes")
        model = tiny.model(tmp_path / "wide", hidden_size=64, intermediate_size=128)  # 8 bits from 4096 elements on
    tables = TABLES | {"optim": {"name": optimizer, "lr": 1e-2}, "sched": {"name": "cosine"}}
    whole = trials.undisturbed(trials.small(tmp_path / "whole", encoder=model, **tables))
    trials.assert_goes_on(trials.small(tmp_path / "parts", encoder=model, **tables), whole, step)


@pytest.mark.every(2)
@pytest.mark.parametrize("sched", ["cosine_restarts", "polynomial", "one_cycle"])
def test_other_schedules_go_on_too(tmp_path: Path, model: Path, sched: str) -> None:
    """With groups that have rates of their own; and rows with several classes."""
    optim = {"lr": 1e-2, "layer_decay": 0.7, "head_lr_factor": 3.0}
    tables = TABLES | {"optim": optim, "sched": {"name": sched, "warmup_ratio": 0.3}}

    def trial(name: str) -> trials.Trial:
        data = tiny.multi_label_data(tmp_path / name / "data")
        return trials.Trial(tmp_path / name, encoder=model, data=data, **tables)

    trials.assert_goes_on(trial("parts"), trials.undisturbed(trial("whole")), 4)


@pytest.mark.slow
def test_micro_batches_workers_and_checkpointing_go_on_too(tmp_path: Path, model: Path) -> None:
    tables = TABLES | {"execution": {"micro_batch": 3, "checkpointing": True, "loader_workers": 1}}
    whole = trials.undisturbed(trials.small(tmp_path / "whole", encoder=model, **tables))
    trials.assert_goes_on(trials.small(tmp_path / "parts", encoder=model, **tables), whole, 7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_value(
    tmp_path: Path, model: Path, undisturbed: Undisturbed, reentrant: bool
) -> None:
    execution = {"checkpointing": True, "reentrant": reentrant}
    trial = trials.small(tmp_path, encoder=model, **TABLES, execution=execution)
    result, channel = trial.run()
    assert result == undisturbed.result
    assert channel.points == undisturbed.points


def test_state_on_the_host_changes_no_value_and_goes_on(
    tmp_path: Path, model: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way through the Trainer; a CPU, where it would be refused, stands in for the device."""
    monkeypatch.setattr("dryfit.training.optimizer.cannot_offload", lambda *_: None)
    trial = trials.small(tmp_path, encoder=model, **TABLES, execution={"offload_optimizer": True})
    _, before = trial.run(stop_at=4)
    trial.plan = trial.plan.model_copy(update={"offload_optimizer": False})
    _, between = trial.run(stop_at=3)
    trial.plan = trial.plan.model_copy(update={"offload_optimizer": True})
    result, after = trial.run()
    assert result == undisturbed.result
    assert before.points + between.points + after.points == undisturbed.points
    assert same_weights(trial.best_weights(), undisturbed.trial.best_weights())


def die_while_writing(trial: trials.Trial, name: str, operation: int) -> int:
    """Run in a process of its own that is killed before an operation on files of a checkpoint; its wait status."""
    trial.resolve()
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        left = operation

        def heard(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in ("open", "os.mkdir", "os.rename") and name in str(arguments[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(heard)
        trial.run(checkpoint_every_s=1e-9)
        os._exit(3)
    return os.waitpid(child, 0)[1]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "operation", [0, 3, 9, 15, *(pytest.param(number, marks=pytest.mark.slow) for number in range(17) if number % 3)]
)
def test_killed_while_a_checkpoint_is_written(
    tmp_path: Path, model: Path, undisturbed: Undisturbed, operation: int
) -> None:
    """The second one, in each of its 17 operations: folder, files, their hashes, their way to the disk, its name."""
    whole, result, points = undisturbed
    trial = trials.small(tmp_path, encoder=model, **TABLES)
    status = die_while_writing(trial, "step-00000005", operation)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    found = newest_good(trial.layout.files_of(1).checkpoints, trial.fingerprint)
    assert found is not None
    assert found.step == 3
    second, after = trial.run(checkpoint_every_s=1e-9)
    assert after.points == points[1:]
    assert second == result
    assert same_weights(trial.best_weights(), whole.best_weights())
    assert not list(tmp_path.glob("**/.*")), "nothing half written stays"


def test_a_checkpoint_that_cannot_be_read_gives_way_to_the_one_before(
    tmp_path: Path, model: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are as they were written, and torch does not take them."""
    whole, result, points = undisturbed
    trial = trials.small(tmp_path, encoder=model, **TABLES)
    trial.run(stop_at=4)
    trial.run(stop_at=3)
    with monkeypatch.context() as patch:
        patch.setattr("torch.load", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("unknown version")))
        with pytest.raises(CorruptCheckpointError, match="step-00000007.*unknown version"):
            trial.run()
    second, after = trial.run()
    assert after.points == points[1:]
    assert second == result
    assert same_weights(trial.best_weights(), whole.best_weights())


def test_where_every_checkpoint_is_damaged_the_trial_begins_anew_and_says_so(
    tmp_path: Path, model: Path, undisturbed: Undisturbed
) -> None:
    whole, result, points = undisturbed
    trial = trials.small(tmp_path, encoder=model, **TABLES)
    trial.run(stop_at=4)
    for file in (tmp_path / "checkpoints").glob("*/model.safetensors"):
        file.write_bytes(file.read_bytes()[::-1])
    second, after = trial.run()
    assert after.points == points
    assert second == result
    assert same_weights(trial.best_weights(), whole.best_weights())
    notes = [message.text for message in after.messages() if isinstance(message, Note)]
    what = "the checkpoint step-00000004 is damaged (model.safetensors: its hash is another)"
    assert notes == [f"{what}, and there is no good one before: beginning anew"]


def test_going_on_after_the_end_changes_nothing(tmp_path: Path, model: Path, undisturbed: Undisturbed) -> None:
    trial = trials.small(tmp_path, encoder=model, **TABLES)
    trial.run(checkpoint_every_s=1e-9)
    again, channel = trial.run(checkpoint_every_s=1e-9)
    assert again == undisturbed.result
    assert channel.lasts == [3]
    assert channel.points == undisturbed.points[3:]  # from the checkpoint at step 8


def test_a_verdict_ends_the_trial(tmp_path: Path, model: Path, undisturbed: Undisturbed) -> None:
    trial = trials.small(tmp_path, encoder=model, **TABLES)
    result, channel = trial.run(verdict=lambda point: point.n < 1)
    assert (result.stopped_by, result.steps) == (StopReason.VERDICT, 5)
    assert channel.points == undisturbed.points[:2]


def test_early_stopping_follows_from_the_reports(tmp_path: Path, model: Path) -> None:
    tables = TABLES | {"train": TABLES["train"] | {"epochs": 4, "early_stopping": 2}, "optim": {"lr": 5e-3}}
    trial = trials.small(tmp_path / "whole", encoder=model, **tables)
    want, channel = trial.run()
    whole = Undisturbed(trial, want, channel.points)
    assert want.stopped_by is StopReason.EARLY_STOPPING
    assert channel.lasts == [len(channel.points) - 1]  # it ends there by itself: no pruner is asked to end it
    assert want.best == len(channel.points) - 3
    trials.assert_goes_on(trials.small(tmp_path / "parts", encoder=model, **tables), whole, want.steps - 1)


def test_a_loss_that_is_not_finite_is_said_with_step_and_rate(tmp_path: Path, model: Path) -> None:
    trial = trials.small(
        tmp_path,
        encoder=model,
        optim={"name": "sgd", "lr": 10.0, "beta1": 0.99},
        regularization={"max_grad_norm": 0.0},
        train={"epochs": 60},
    )
    with pytest.raises(NonFiniteError, match=r"training step \d+ of 300: loss .*learning rate") as caught:
        trial.run()
    assert caught.value.code == "NONFINITE"


def test_a_real_stop_file_and_a_deadline(tmp_path: Path, model: Path) -> None:
    """With the real channel: nobody answers, so the child goes on and says so; then the stop file ends it."""
    trial = trials.small(tmp_path, encoder=model, **TABLES)
    request = trial.request().model_copy(update={"verdict_timeout_s": 0.05})
    (tmp_path / "attempt").mkdir()
    channel = ChildChannel(tmp_path / "attempt", wakeup_fifo=None, placed_at_s=time.monotonic())
    result = train(request, channel)
    assert result.stopped_by is None
    assert result.peak_rss_bytes is not None
    assert result.peak_rss_bytes > 100 << 20
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (None, None)
    messages = trials.ScriptedChannel.messages(channel)  # type: ignore[arg-type]
    assert [message.text for message in messages if isinstance(message, Note)] == [
        f"no verdict on report {n} within 0.05 s: went on" for n in range(4)
    ]
    assert [message.name for message in messages if isinstance(message, Phase)][:1] == ["train"]
    assert sum(isinstance(message, FirstStep) for message in messages) == 1
    assert all(m.total_steps == STEPS for m in messages if isinstance(m, Progress))
    (tmp_path / "attempt" / STOP_FILE).touch()
    again = trials.small(tmp_path / "again", encoder=model, **TABLES)
    stopped = train(again.request(), channel)
    assert (stopped.stopped_by, stopped.steps) == (StopReason.REQUEST, 1)
