"""Trials that several processes train together: makers of small ones, and what may happen to a rank."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import spans
import tiny
import tiny_lms
import trials
from dryfit.parallel import fsdp as model_module
from dryfit.settings.errors import CommError
from dryfit.training import trainer as loop
from trials import Trial, Undisturbed

ROUNDING = 2e-5
"""Of fp32 sums in another order, after ten steps."""
QUIET: dict[str, dict[str, Any]] = {
    "regularization": {"dropout": 0.0, "attention_dropout": 0.0},
    "head": {"dropout": 0.0},
}
"""Without dropout: on several processes it draws other numbers."""
NOISY: dict[str, dict[str, Any]] = {
    "train": {"evals_per_epoch": 2},
    "regularization": {"dropout": 0.2, "attention_dropout": 0.1},
    "head": {"dropout": 0.3, "layers": 1},
}
SGD = {"optim": {"name": "sgd", "lr": 0.05}}
"""In fp32 Adam makes steps of rounding: where a gradient is zero, it divides one by another."""
ADAPTERS = "adapter_model.safetensors"


def criteria(folder: Path, model: Path, **tables: Any) -> Trial:
    """A trial of classes, without dropout."""
    return trials.small(folder, encoder=model, **trials.merged(QUIET, tables))


def of_spans(task: str, **further: Any) -> Callable[..., Trial]:
    """Makes trials of a task of spans, without dropout."""

    def make(folder: Path, model: Path, **tables: Any) -> Trial:
        metric = "token_f1" if task == "evidence" else "combined"
        settings = trials.merged(QUIET, {"train": {"max_length": 28}, "span": {"doc_stride": 6}}, further, tables)
        study = {"task": task, "metric": metric}
        return Trial(folder, encoder=model, data=spans.both_data(folder / "data"), study=study, **settings)

    return make


def of_decoder(architecture: str, rank: int, **sizes: Any) -> Callable[..., Trial]:
    """Makes trials of a language model of other sizes than usual, with adapters of a rank or with none.

    Its weights lie beside the encoder's.
    """

    def make(folder: Path, model: Path, **tables: Any) -> Trial:
        usual = {
            "train": {"epochs": 1, "max_length": 160, "batch_size": 8},
            "lm": {"format": "both", "max_new_tokens": 3, "generate_rows": 4, "answers": "never, always walk"},
            "lora": {"r": rank, "dropout": 0.0} if rank else {"r": 0},
        }
        decoder = model.parent / "-".join(["decoder", architecture, *map(str, sizes.values())])
        if not decoder.exists():
            tiny_lms.causal_lm(decoder, architecture, sizes=sizes)
        rows = tiny.data(folder / "data", train=24, validation=8)
        return Trial(folder, encoder=decoder, data=rows, study={"task": "causal-lm"}, **trials.merged(usual, tables))

    return make


OF_EACH_KIND: dict[str, Callable[..., Trial]] = {
    "criteria": criteria,
    "evidence": of_spans("evidence"),
    "share": of_spans("share", multitask={"weighting": "uncertainty"}),
    "joint": of_spans("joint", joint={"fusion": "attention", "criterion_length": 8}),
    "joint, layers shared": of_spans("joint", joint={"share_ratio": 0.5, "criterion_length": 8}),
    "adapters": of_decoder("qwen2", 4),
}
"""Of each kind one."""


@contextmanager
def plans_in(folder: Path) -> Iterator[None]:
    """All trials keep plans and proofs in one folder, as those of a study do: each model is planned and proved once."""
    with mock.patch.object(model_module, "PLANS_FOLDER", str(folder.absolute())):
        yield


def each_once(makers: dict[str, Callable[..., Trial]], folder: Path, model: Path) -> Callable[[str], Undisturbed]:
    """From a kind of trial to what one process makes of it, which is run once.

    Args:
        makers: By kind.
        folder: For the trials.
        model: The encoder of those that have one.
    """
    return cache(lambda kind: trials.undisturbed(makers[kind](folder / f"alone, {kind}", model, **SGD)))


def weights(trial: Trial) -> dict[str, torch.Tensor]:
    """What a trial has saved."""
    saved = trial.folder / "best" / ADAPTERS
    return trial.best_weights(ADAPTERS if saved.exists() else "model.safetensors")


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """The same tensors, up to rounding."""
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < ROUNDING


def on_rank_1(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[Any], object]) -> None:
    """Something happens to rank 1 after a number of steps' gradients; it is given the model."""
    original, count = loop.backward_batch, [0]

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        count[0] += 1
        if dist.is_initialized() and dist.get_rank() == 1 and count[0] == step:
            do(args[0])
        return found

    monkeypatch.setattr(loop, "backward_batch", disturbed)


def ends_with(trial: Trial, **kwargs: Any) -> Exception:
    """What a trial raises."""
    with pytest.raises(Exception) as caught:  # which one is what is looked at
        trial.run(**kwargs)
    return caught.value


def assert_goes_on_after_a_kill(trial: Trial, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is killed at its seventh step; the next attempt ends as one that nobody has disturbed, bit for bit."""
    with monkeypatch.context() as patch:
        on_rank_1(patch, 7, lambda _: os.kill(os.getpid(), signal.SIGKILL))
        error = ends_with(trial, checkpoint_every_s=1e-9)
    assert isinstance(error, CommError) and "rank 1 was killed by SIGKILL" in str(error)
    kept = sorted(path.name for path in (trial.folder / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000005"]
    result, channel = trial.run()
    assert (result, channel.points) == (undisturbed.result, list(undisturbed.points[2:]))
    assert trials.same_weights(trial.best_weights(), undisturbed.trial.best_weights())
