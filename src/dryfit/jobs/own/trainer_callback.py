"""The callback that connects a Trainer of the user's own with its trial: reports, verdicts, stops and checkpoints."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ObjectiveError
from dryfit.core.jobs.train import StopReason
from dryfit.core.wire import Note, Progress, empty_beside, publish_folder
from dryfit.jobs.own.objective_trial import Trial
from dryfit.jobs.own.trainer_checkpoints import CheckpointMark, Evaluation, mark_whole
from dryfit.jobs.own.trainer_goals import Goals, numbers_of

_PROGRESS_EVERY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class TrialTerms:
    """What the callback needs to know of the trial.

    Attributes:
        goals: What the study optimises.
        best_dir: Folder of the weights of the best evaluation; None: nobody keeps them.
        checkpoint_every_s: Seconds between checkpoints that the Trainer does not ask for itself, at evaluations.
        clock: Monotonic, in seconds.
    """

    goals: Goals
    best_dir: Path | None
    checkpoint_every_s: float
    clock: Callable[[], float] = time.monotonic


@final
class ReportingCallback(TrainerCallback):
    """Reports evaluations, ends training when told to, and marks checkpoints that are whole.

    It must be the last callback of its Trainer: it decides over what those before it ask for. A checkpoint of a step of
    which an evaluation is still to come (at the end of an epoch) waits for it, because an attempt that goes on from
    there would pass it over.

    Args:
        trainer: The Trainer.
        trial: Its trial.
        channel: How it reports.
        terms: What it needs to know of the trial.
        went_on_from: What the checkpoint says that this attempt begins with; None: it begins anew.

    Attributes:
        evaluations: All so far, those of earlier attempts included.
        cut_short: Training was ended by a verdict or a stop, not by itself.
    """

    def __init__(
        self,
        trainer: Trainer,
        trial: Trial,
        channel: ChildChannel,
        terms: TrialTerms,
        went_on_from: CheckpointMark | None = None,
    ) -> None:
        self._trainer, self._trial, self._channel, self._terms = trainer, trial, channel, terms
        self.evaluations = list(went_on_from.evaluations) if went_on_from is not None else []
        self.cut_short = False
        self._ended = False  # by the Trainer itself, or by another callback
        self._begun = False
        self._save_later = False
        self._reported_step = self._saved_step = -1
        self._saved_at_s, self._progress_at_s = terms.clock(), 0.0
        self._unread_said = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put right what an earlier attempt's folder is named in."""
        if self._begun:
            raise ObjectiveError(
                "training the trial's Trainer",
                "training began anew with a smaller batch, which changes what the trial learns",
                "auto_find_batch_size=False",
                "set gradient_accumulation_steps and a per_device_train_batch_size that fits",
            )
        self._begun = True
        best = Path(args.output_dir or "") / f"checkpoint-{state.best_global_step}"
        state.best_model_checkpoint = str(best) if state.best_global_step and best.is_dir() else None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse to train on for a metric that evaluations do not have."""
        self._demand_metrics()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look for a request to stop; hold a checkpoint back until the evaluation of its step."""
        self._channel.stepped()
        self._note_end(state, control)
        if not self._ended and not self.cut_short and self._trial.should_stop:
            self._cut_short(control)
        evaluates = IntervalStrategy(args.eval_strategy) == IntervalStrategy.EPOCH
        if control.should_save and evaluates and (_epoch_is_whole(state) or control.should_training_stop):
            control.should_save, self._save_later = False, True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the checkpoint of a stop; in the middle of an epoch do nothing else that its end would do."""
        self._note_end(state, control)
        if self.cut_short:
            pruned = self._trial.stopped_by is StopReason.VERDICT
            if pruned or not _epoch_is_whole(state):
                control.should_evaluate = control.should_log = False
            control.should_save = not pruned and self._saved_step != state.global_step and not args.save_only_model
        elif self._save_later:
            control.should_save = True
        self._save_later = False

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the evaluation, keep its weights if it is the best, and end training if the verdict says so."""
        self._note_end(state, control)
        numbers, step = numbers_of(kwargs.get("metrics") or {}), state.global_step
        value = self._terms.goals.first(numbers)
        improved = value is not None and self._terms.goals.is_better(value, self.evaluations)
        self._keep(Evaluation(step=step, epoch=float(state.epoch or 0.0), metrics=numbers))
        if value is None or step <= self._reported_step:
            return  # of another data set, or once more
        self._reported_step = step
        stop = self._trial.report(value, step, epoch=float(state.epoch or 0.0), metrics=numbers)
        if stop and not self._ended:
            self._cut_short(control)
        if self._trial.stopped_by is StopReason.VERDICT:
            control.should_save = False
            return
        if improved and self._terms.best_dir is not None:
            temporary = empty_beside(self._terms.best_dir)
            self._trainer.save_model(str(temporary))
            publish_folder(temporary, self._terms.best_dir, {})
        due = self._terms.clock() - self._saved_at_s >= self._terms.checkpoint_every_s
        if (due or self.cut_short) and not args.save_only_model:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mark the checkpoint as whole, and say that the trial can go on from there."""
        step = state.global_step
        if args.save_only_model or self._saved_step == step:
            return
        self._note_end(state, control)
        folder = Path(args.output_dir or "") / f"checkpoint-{step}"
        mark_whole(folder, step=step, done=self._ended, evaluations=self.evaluations)
        self._saved_step, self._saved_at_s = step, self._terms.clock()
        self._trial.checkpointed(step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say how far training is."""
        loss, now_s = (kwargs.get("logs") or {}).get("loss"), self._terms.clock()
        if isinstance(loss, float) and now_s - self._progress_at_s >= _PROGRESS_EVERY_S:
            self._progress_at_s = now_s
            epoch = float(state.epoch or 0.0)
            self._channel.send(Progress(step=state.global_step, total_steps=state.max_steps, epoch=epoch, loss=loss))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a training whose evaluations lack the metric."""
        self._demand_metrics()

    def _note_end(self, state: TrainerState, control: TrainerControl) -> None:
        at_end = state.global_step >= state.max_steps > 0
        self._ended = self._ended or at_end or (control.should_training_stop and not self.cut_short)

    def _cut_short(self, control: TrainerControl) -> None:
        self.cut_short = control.should_training_stop = True

    def _keep(self, evaluation: Evaluation) -> None:
        """Add an evaluation; those of several data sets at one step are one."""
        if self.evaluations and self.evaluations[-1].step == evaluation.step:
            metrics = self.evaluations.pop().metrics | evaluation.metrics
            evaluation = evaluation.model_copy(update={"metrics": metrics})
        self.evaluations.append(evaluation)

    def _demand_metrics(self) -> None:
        if not self.evaluations:
            return
        self._terms.goals.demand(self.evaluations[-1])
        if not self._unread_said:
            self._unread_said = True
            if unread := self._trial.unread:
                said = f"nothing has read {', '.join(unread)} from trial.params: the search over it has no effect"
                self._channel.send(Note(text=said))


def _epoch_is_whole(state: TrainerState) -> bool:
    return float(state.epoch or 0.0).is_integer()
