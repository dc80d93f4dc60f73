"""Run tiny trials in this process, against a channel that follows a script."""

import json
import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

import tiny
from dryfit.ledger.folder import FinalLayout
from dryfit.processes.channel import ChildChannel
from dryfit.settings.choices import BuiltInTask, Direction, Metric
from dryfit.settings.execution import ExecutionPlan
from dryfit.settings.memory_terms import DeviceKind, OptimizerImpl
from dryfit.settings.tables import DataSettings, TrialSettings
from dryfit.settings.task_facts import metric_of
from dryfit.settings.text import LineTail
from dryfit.settings.training_messages import (
    FinalRequest,
    FinalResult,
    PredictRequest,
    PredictResult,
    ResolveRequest,
    ResolveResult,
    StopReason,
    TrainRequest,
    TrainResult,
)
from dryfit.settings.trial import MetricPoint, TrialConfig
from dryfit.settings.wire import MESSAGE, MESSAGES_FILE, Checkpointed, Job, Message, Note
from dryfit.study.files import take_over
from dryfit.tasks.saved_models import read_model_input
from dryfit.training.prediction import predict
from dryfit.training.resolve import resolve
from dryfit.training.trial_jobs import final, train


def merged(*several: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tables of settings, the later ones over the earlier."""
    found: dict[str, dict[str, Any]] = {}
    for tables in several:
        for name, table in tables.items():
            found[name] = found.get(name, {}) | table
    return found


class ScriptedChannel(ChildChannel):
    """Answers every report at once, and asks to stop at a given step."""

    def __init__(
        self, folder: Path, *, stop_at: int | None = None, verdict: Callable[[MetricPoint], bool] = lambda _: True
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, wakeup_fifo=None, placed_at_s=0.0)
        self.points: list[MetricPoint] = []
        self.lasts: list[int] = []
        """Numbers of the reports with which training ends, as it says."""
        self._stop_in = stop_at
        self._verdict = verdict

    def stop_requested(self) -> StopReason | None:
        """The loop asks once after every optimizer step that is not the last."""
        if self._stop_in is not None:
            self._stop_in -= 1
            if self._stop_in <= 0:
                return StopReason.REQUEST
        return None

    def report(self, point: MetricPoint, *, timeout_s: float, last: bool = False) -> bool:
        """Keep the report, follow the script."""
        self.points.append(point)
        self.lasts += [point.n] if last else []
        return self._verdict(point)

    def messages(self) -> list[Message]:
        """All messages sent."""
        return [MESSAGE.validate_json(line) for line in LineTail(self.folder / MESSAGES_FILE).read()]


def apart(attempt: Callable[[], tuple[Any, list[Any]]]) -> tuple[Any, list[Any]]:
    """Do something in a process of its own, as the fork server does.

    One that has had a process group cannot be forked again.

    Args:
        attempt: Gives a result and what belongs to it, or an exception and its notes.

    Raises:
        Exception: What the attempt gave, with its notes.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(attempt(), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said, notes = pickle.load(pipe)  # noqa: S301  # we have written it ourselves
    assert os.waitpid(pid, 0)[1] == 0
    if isinstance(said, Exception):
        said.__notes__ = notes
        raise said
    return said, notes


def _apart(request: TrainRequest, channel: ScriptedChannel) -> TrainResult | None:
    """Train in a process of its own."""
    result, channel.points = apart(lambda: _attempt(request, channel))
    return result


def _attempt(request: TrainRequest, channel: ScriptedChannel) -> tuple[object, list[Any]]:
    said: object
    try:
        said, notes = train(request, channel), channel.points
    except Exception as error:
        said, notes = error, getattr(error, "__notes__", [])
    try:
        left = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return said, notes
    return AssertionError(f"a rank is left: {left}"), []


class Trial:
    """A tiny trial in a folder, which may be run again and again."""

    def __init__(self, folder: Path, *, encoder: Path | str, data: dict[str, Any], **tables: dict[str, Any]) -> None:
        self.folder = folder
        study = tables.pop("study", {})
        task, metric = study.get("task", "criteria"), metric_of(study.get("metric", "loss"))
        self.task = task if ":" in task else BuiltInTask(task)
        micro = tables.pop("execution", {})
        self.data = DataSettings(**data)
        usual = {
            "train": {"epochs": 2, "batch_size": 8, "max_length": 32},
            "optim": {"lr": 2e-3},
            "model": {"name": str(encoder)},
        }
        settings = merged(usual, tables)
        self.settings = TrialSettings.model_validate_json(json.dumps(settings))
        batch = self.settings.train.batch_size
        rows = min(micro.get("micro_batch") or batch, batch)
        self.plan = ExecutionPlan(
            device=DeviceKind.CPU,
            effective_batch=batch,
            micro_batch=rows,
            accumulation=-(-batch // rows),
            eval_batch=micro.get("eval_batch"),
            checkpointing=micro.get("checkpointing", False),
            offload_activations=micro.get("offload_activations", False),
            reentrant=micro.get("reentrant", False),
            optimizer_impl=OptimizerImpl(micro.get("optimizer_impl", "auto")),
            offload_optimizer=micro.get("offload_optimizer", False),
            loader_workers=micro.get("loader_workers", 0),
            compiled=micro.get("compiled", False),
            tp=micro.get("tp", 1),
            dp=micro.get("dp", 1),
        )
        self.metric = metric
        wanted = "minimize" if metric in (Metric.LOSS, Metric.ECE) else "maximize"
        self.direction = Direction(study.get("direction", wanted))
        self.params: dict[str, Any] = {}
        self.seed = 3
        self.fingerprint = "recorded"
        """What identifies it; no hash of its configuration, so that nothing comes to be taken by one."""

    @property
    def layout(self) -> FinalLayout:
        """Where its files lie."""
        return FinalLayout(self.folder)

    def resolve(self) -> ResolveResult:
        """Prepare the data."""
        body = ResolveRequest(
            task=self.task,
            metrics=(self.metric,),
            data=self.data,
            settings=self.settings,
            pairs=((self.settings.model, self.settings.train.max_length),),
            cache_dir=str(self.folder / "cache"),
            device=str(self.plan.device),
            precisions=(str(self.settings.train.precision),),
        )
        return resolve(body, ScriptedChannel(self.folder / "resolve"))

    def request(self, *, checkpoint_every_s: float = 1e9) -> TrainRequest:
        """The request of the next attempt; what the one before left is taken over, as the control process does."""
        take_over(self.layout, self.layout.attempts, Job.TRAIN)
        attempt = self.layout.attempts + 1
        own = self.layout.files_of(attempt)
        own.folder.mkdir(parents=True)
        config = TrialConfig(
            number=0,
            task=self.task,
            metric=self.metric,
            direction=self.direction,
            data=self.data,
            settings=self.settings,
            params=self.params,
            seed=self.seed,
            data_fingerprint=self.resolve().data_fingerprint,
        )
        return TrainRequest(
            config=config,
            fingerprint=self.fingerprint,
            plan=self.plan,
            attempt=attempt,
            cache_dir=str(self.folder / "cache"),
            checkpoint_dir=str(own.checkpoints),
            kept_checkpoint_dir=str(self.layout.checkpoints),
            best_dir=str(own.best),
            scored_dir=str(own.scored),
            kept_best_dir=str(self.layout.best),
            load_report=str(own.load_report),
            checkpoint_every_s=checkpoint_every_s,
            verdict_timeout_s=5,
        )

    def run(
        self,
        *,
        stop_at: int | None = None,
        verdict: Callable[[MetricPoint], bool] = lambda _: True,
        checkpoint_every_s: float = 1e9,
    ) -> tuple[TrainResult, ScriptedChannel]:
        """Run an attempt; goes on from a checkpoint if an earlier one left one.

        The result comes without what differs from process to process.
        """
        request = self.request(checkpoint_every_s=checkpoint_every_s)
        channel = ScriptedChannel(self.layout.attempt(request.attempt), stop_at=stop_at, verdict=verdict)
        try:
            result = _apart(request, channel) if self.plan.processes > 1 else train(request, channel)
        finally:
            take_over(self.layout, request.attempt, Job.TRAIN)
        return result.model_copy(update={"peak_rss_bytes": None}), channel

    def best_weights(self, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
        """The weights of the best validation."""
        return load_file(self.layout.best / name)


def alone(request: TrainRequest, folder: Path) -> TrainRequest:
    """A request whose attempts all have their files in one folder, where nobody else writes."""
    both = {name: str(folder / "checkpoints") for name in ("checkpoint_dir", "kept_checkpoint_dir")}
    best = {name: str(folder / "best") for name in ("best_dir", "kept_best_dir")}
    return request.model_copy(update=both | best)


def small(folder: Path, *, encoder: Path, **tables: dict[str, Any]) -> Trial:
    """A trial of ten steps on forty rows."""
    return Trial(folder, encoder=encoder, data=tiny.data(folder / "data"), **tables)


class Undisturbed(NamedTuple):
    """A trial that nobody stopped, and what it came to."""

    trial: Trial
    result: TrainResult
    points: Sequence[MetricPoint]


def undisturbed(trial: Trial) -> Undisturbed:
    """Run a trial to its end."""
    result, channel = trial.run()
    return Undisturbed(trial, result, channel.points)


def same_weights(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    """The same tensors, bit for bit."""
    return have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)


def assert_goes_on(trial: Trial, whole: Undisturbed, step: int) -> None:
    """A trial like another one, stopped after a step and begun again, ends like that one, bit for bit."""
    first, before = trial.run(stop_at=step)
    assert (first.stopped_by, first.steps) == (StopReason.REQUEST, step)
    assert Checkpointed(step=step) in before.messages()
    second, after = trial.run()
    assert before.points + after.points == whole.points
    assert second == whole.result
    assert same_weights(trial.best_weights(), whole.trial.best_weights())


def predicted(
    model: Path, source: Path | str, out: Path, *, batch_rows: int = 4
) -> tuple[PredictResult, list[dict[str, Any]]]:
    """What ``dryfit predict`` comes to, and the lines that it writes; its channel is the folder ``channel`` beside."""
    body = PredictRequest(
        model_dir=str(model),
        source=str(source),
        out=str(out),
        temporary=str(out.with_name(".temporary")),
        batch_rows=batch_rows,
        device="cpu",
        threads=1,
    )
    result = predict(body, ScriptedChannel(out.with_name("channel")))
    return result, read_lines(out)


def with_validation(
    trial: Trial, folder: Path, *, last_step: int, chosen: Path | None
) -> tuple[FinalResult, Mapping[str, float], list[str]]:
    """Train on train and validation together: the result, what the model has fitted, and what was noted."""
    model = folder / "model"
    request = FinalRequest(
        training=alone(trial.request(), folder),
        last_step=last_step,
        chosen_dirs=(str(folder / "gone"), *([] if chosen is None else [str(chosen)])),
        model_dir=str(model),
        attempt_model_dir=str(model),
        study="s",
    )
    channel = ScriptedChannel(folder)
    done = final(request, channel)
    assert isinstance(done, FinalResult)
    notes = [message.text for message in channel.messages() if isinstance(message, Note)]
    return done, read_model_input(model).fitted, notes


def read_lines(path: Path | str | None) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in Path(path or "").read_text(encoding="utf-8").splitlines()]


def killed(trial: Trial, when: Callable[[MetricPoint], bool], *, checkpoint_every_s: float) -> None:
    """Run it in a process of its own that is killed with SIGKILL while a report waits for its verdict."""
    trial.resolve()
    torch.set_num_threads(1)

    def answer(point: MetricPoint) -> bool:
        if when(point):
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    child = os.fork()
    if child == 0:
        trial.run(verdict=answer, checkpoint_every_s=checkpoint_every_s)
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
