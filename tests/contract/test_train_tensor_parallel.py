"""A trial whose model is sharded over two processes is the trial that one process trains, whatever ends one of them."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dryfit
import reads
import tiny
import trials
from dryfit.parallel import fsdp as model_module
from dryfit.parallel import proved_plans as sharding
from dryfit.parallel.proved_plans import ProvedPlan
from dryfit.parallel.tensor_parallel import TensorParallelLayout
from dryfit.settings.check_messages import LoadReport
from dryfit.settings.errors import NonFiniteError
from dryfit.settings.files import read_model
from dryfit.settings.training_messages import StopReason
from dryfit.settings.wire import Checkpointed, Note, Started
from dryfit.training import trial_jobs as entry
from dryfit.training.trial_jobs import train
from together import (
    NOISY,
    OF_EACH_KIND,
    SGD,
    assert_close,
    assert_goes_on_after_a_kill,
    criteria,
    each_once,
    ends_with,
    of_decoder,
    on_rank_1,
    plans_in,
    weights,
)
from trials import Trial, Undisturbed, merged

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SHARDED = {"tp": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


WORDS: dict[str, Any] = {"vocab_size": 4608}


def of_many_words_in_parts(folder: Path, model: Path, **tables: Any) -> Trial:
    """Weighted tokens of several examples in a sequence, in micro-batches that are computed again."""
    own = {"lm": {"mix": 0.8, "packing": True, "learn_prompt": True}}
    how = {"execution": {**tables.pop("execution", {}), "checkpointing": True, "micro_batch": 3}}
    return of_decoder("qwen2", 0, **WORDS)(folder, model, **merged(own, how, tables))


@pytest.fixture(scope="module", autouse=True)
def _plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with plans_in(tmp_path_factory.mktemp("plans")):
        yield


MAKERS: dict[str, Callable[..., Trial]] = OF_EACH_KIND | {
    "words": of_decoder("llama", 0, **WORDS),
    "words, adapters": of_decoder("qwen2", 4, **WORDS),
    "words, recomputed": of_many_words_in_parts,
    "checkpointed": lambda folder, model, **tables: criteria(
        folder,
        model,
        **{**tables, "execution": {**tables.get("execution", {}), "checkpointing": True, "micro_batch": 3}},
    ),
}
QUICK = ("criteria",)
EACH_DAY = (*QUICK, "words, adapters", "checkpointed")
AT_NIGHT = {name: [pytest.mark.nightly] for name in MAKERS if name not in EACH_DAY}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[str], Undisturbed]:
    return each_once(MAKERS, tmp_path_factory.mktemp("alone"), model)


@pytest.mark.parametrize(
    "task",
    [
        task if task in QUICK else pytest.param(task, marks=[pytest.mark.slow, *AT_NIGHT.get(task, ())])
        for task in MAKERS
    ],
)
def test_two_processes_learn_what_one_does(
    tmp_path: Path, model: Path, alone: Callable[[str], Undisturbed], task: str
) -> None:
    one, sharded = alone(task), MAKERS[task](tmp_path / "2", model, **SGD, execution=SHARDED)
    other, heard = sharded.run()
    assert other.steps == one.result.steps and len(heard.points) == len(one.points) > 0
    for mine, theirs in zip(heard.points, one.points, strict=True):
        assert mine.metrics == pytest.approx(theirs.metrics, abs=1e-4)
    assert_close(weights(sharded), weights(one.trial))
    assert_scores_stay_sharded(task.startswith("words"))
    loaded, whole = (dryfit.load(trial.folder / "best").state_dict() for trial in (sharded, one.trial))
    assert_close(loaded, whole)


def assert_scores_stay_sharded(expected: bool) -> None:
    """Of all plans made so far, those of many words keep their scores sharded, and no other."""
    plans = [read_model(kept, ProvedPlan).plan for kept in Path(model_module.PLANS_FOLDER).glob("*.json")]
    many = [plan.vocabulary == WORDS["vocab_size"] for plan in plans]
    assert [plan.scores is not None for plan in plans] == many
    assert any(many) or not expected


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Undisturbed:
    return trials.undisturbed(
        trials.small(tmp_path_factory.mktemp("whole"), encoder=model, **NOISY, execution=dict(SHARDED))
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, pytest.param(9, marks=pytest.mark.nightly)])
def test_it_goes_on_as_if_it_had_not_been_stopped(
    tmp_path: Path, model: Path, undisturbed: Undisturbed, step: int
) -> None:
    trials.assert_goes_on(trials.small(tmp_path, encoder=model, **NOISY, execution=dict(SHARDED)), undisturbed, step)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_attempt_and_the_next_one_goes_on(
    tmp_path: Path, model: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trials.small(tmp_path, encoder=model, **NOISY, execution=dict(SHARDED))
    assert_goes_on_after_a_kill(trial, undisturbed, monkeypatch)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        pytest.param(NonFiniteError("training", "loss nan", hint="a smaller rate"), marks=pytest.mark.slow),
    ],
)
def test_what_ended_a_rank_is_what_ended_the_trial(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: object) -> None:
        raise error

    on_rank_1(monkeypatch, 2, fail)
    found = ends_with(criteria(tmp_path, model, execution=SHARDED))
    assert type(found) is type(error) and str(found) == str(error)
    assert any("rank 1" in note for note in found.__notes__)


@pytest.mark.slow
def test_rank_0_alone_speaks_and_each_rank_reads_and_holds_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "PLANS_FOLDER", sharding.PLANS_FOLDER)  # a plan of its own
    # So wide that the header of the file is less than a hundredth of what a rank reads.
    wide = tiny.model(tmp_path / "wide", hidden_size=128, intermediate_size=512)
    original, together = TensorParallelLayout.save_whole_state, entry.run_in_process_group
    held: list[int] = []

    def looking(self: TensorParallelLayout, module: Any, optimizer: Any) -> None:
        held.append(sum(one.numel() for one in module.parameters()))
        original(self, module, optimizer)

    def reading(plan: Any, channel: Any, job: Callable[[Any], Any]) -> Any:
        def work(group: Any) -> Any:
            read.clear()  # what was read before the ranks were forked
            result = job(group)
            facts = {"held": held, "read": read.bytes_of(wide / "model.safetensors")}
            (tmp_path / f"rank-{group.rank}").write_text(json.dumps(facts))
            return result

        return together(plan, channel, work)

    monkeypatch.setattr(TensorParallelLayout, "save_whole_state", looking)
    monkeypatch.setattr(entry, "run_in_process_group", reading)
    trial = criteria(tmp_path, wide, execution=SHARDED)
    with reads.counted() as read:
        _, channel = trial.run()
    facts = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    whole = sum(one.numel() for one in trial.best_weights().values())
    assert facts[0] == facts[1] and len(facts[0]["held"]) == 1
    assert facts[0]["held"][0] < 0.6 * whole
    slices_bytes = _slices_bytes(trial)
    assert slices_bytes <= facts[0]["read"] <= 1.01 * slices_bytes < 0.6 * (wide / "model.safetensors").stat().st_size
    assert not [message for message in channel.messages() if isinstance(message, Started | Note)]
    steps = [message.step for message in channel.messages() if isinstance(message, Checkpointed)]
    assert len(steps) == len(set(steps))


def _slices_bytes(trial: Trial) -> int:
    """Bytes of what a rank holds of the pretrained weights, in fp32, as the plan says."""
    (file,) = (trial.folder / "cache" / sharding.PLANS_FOLDER).iterdir()
    plan = ProvedPlan.model_validate_json(file.read_bytes()).plan
    drawn = LoadReport.model_validate_json((trial.folder / "load.json").read_bytes()).random
    held = {name: math.prod(shard.local_shape(plan.degree)) for name, shard in plan.parameters.items()}
    assert drawn and set(drawn) < set(held)
    return 4 * sum(size for name, size in held.items() if name not in drawn)


@pytest.mark.slow
@pytest.mark.nightly
def test_folds_are_trained_one_after_another_on_the_same_processes(tmp_path: Path, model: Path) -> None:
    found = []
    for name, how in (("1", {}), ("2", SHARDED)):
        trial = criteria(tmp_path / name, model, execution=how)
        trial.data = trial.data.model_copy(update={"folds": 2})
        first, before = trial.run(stop_at=7)
        assert first.stopped_by is StopReason.REQUEST
        result, after = trial.run()
        found.append([result.value, *(point.value for point in before.points + after.points)])
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_one_process_needs_no_group(tmp_path: Path, model: Path) -> None:
    trial = criteria(tmp_path, model)
    request = trial.request()
    train(request, trials.ScriptedChannel(tmp_path / "attempt"))
    assert not (tmp_path / "attempt" / "ranks").exists()
