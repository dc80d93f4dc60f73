"""The Trainer that a script trains: it gets dryfit's callback and folder by itself, and goes on from a checkpoint."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from dryfit.gpu.training_arguments import ArgumentWatch
from dryfit.meta.private_apis.transformers_trainer import load_trained
from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import ObjectiveError
from dryfit.settings.training_messages import OwnTrainingRequest
from dryfit.settings.wire import Note, Phase
from dryfit.training.current_trial import ScriptEnded, ScriptReports, Trial
from dryfit.training.own_trainer import ReportingCallback, adapt, connect, demand_changed
from dryfit.training.script_arguments import ArgumentReads

_STATE_FILE: Final = "trainer_state.json"


@final
class ScriptTrainers:
    """Connects the one Trainer that a script trains with the script's trial.

    Attributes:
        callback: Of the Trainer that is, or was, trained; None: none was so far.
    """

    def __init__(
        self,
        trial: Trial,
        channel: ChildChannel,
        body: OwnTrainingRequest,
        reports: ScriptReports,
        arguments: ArgumentReads,
        planned: ArgumentWatch,
    ) -> None:
        self._trial, self._channel, self._body = trial, channel, body
        self._reports, self._arguments, self._planned = reports, arguments, planned
        self._trainer: Trainer | None = None
        self._evaluating = 0
        self.callback: ReportingCallback | None = None

    def install(self) -> None:
        """Change the classes of this process, for good."""
        arguments: Any = TrainingArguments
        arguments.__post_init__ = self._given_folder(arguments.__post_init__)
        trainer: Any = Trainer
        trainer.train = self._training(trainer.train)
        trainer.evaluate = self._evaluation(trainer.evaluate)

    def _given_folder(self, post_init: Callable[[Any], None]) -> Callable[[Any], None]:
        folder = str(self._trial.folder)

        @functools.wraps(post_init)
        def given(arguments: Any) -> None:
            arguments.output_dir = folder
            if arguments.push_to_hub:
                arguments.push_to_hub = False
                self._say("push_to_hub=True: nothing is pushed while it is searched")
            post_init(arguments)

        return given

    def _training(self, train: Callable[..., TrainOutput]) -> Callable[..., TrainOutput]:
        @functools.wraps(train)
        def training(
            trainer: Trainer, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
        ) -> TrainOutput:
            self._begin(trainer)
            callback = self.callback = connect(trainer, self._trial, self._channel, self._body)
            found = callback.begun_at
            self._channel.send(Phase(name="train"))
            if found is not None and callback.was_done:
                output = _trained_already(trainer, found)
            else:
                given = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
                output = train(trainer, str(found) if found is not None else given, *args, **kwargs)
            if callback.cut_short:
                raise ScriptEnded  # what follows in the script is for a training that has come to its end
            self._leave_when_known(trainer)
            return output

        return training

    def _begin(self, trainer: Trainer) -> None:
        if self._trainer is not None:
            again = "the same Trainer again" if trainer is self._trainer else f"another one, a {type(trainer).__name__}"
            raise ObjectiveError(
                "training the script's Trainer",
                f"the script has trained one already, and trains {again}",
                "one Trainer that is trained, once: an attempt could not go on from there",
                "put what must be trained before into a script of its own",
            )
        if self._reports.evaluations:
            raise ObjectiveError(
                "training the script's Trainer",
                "the script has reported by itself before",
                "one of the two",
                "take dryfit.report, or script.results, out",
            )
        self._trainer = trainer
        self._reports.of_trainer = True
        demand_changed(trainer, self._planned.overrides, self._planned.replaced)
        unused = self._arguments.other_values(trainer.args, self._planned.replaced)
        for note in (*adapt(trainer, self._trial.folder), *unused):
            self._say(note)

    def _evaluation(self, evaluate: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
        """After training, an evaluation counts only where none of the training had the metric."""

        @functools.wraps(evaluate)
        def evaluation(trainer: Trainer, *args: Any, **kwargs: Any) -> dict[str, float]:
            self._evaluating += 1  # of several data sets it calls itself
            try:
                metrics = evaluate(trainer, *args, **kwargs)
            finally:
                self._evaluating -= 1
            if trainer is self._trainer and not self._evaluating and not trainer.is_in_train:
                self._leave_when_known(trainer)
            return metrics

        return evaluation

    def _leave_when_known(self, trainer: Trainer) -> None:
        """Take the callback off a Trainer that is trained, once the metric is known: test sets are not its business."""
        callback = self.callback
        if callback is not None and callback.goals.are_known(callback.evaluations):
            trainer.pop_callback(callback)

    def _say(self, text: str) -> None:
        self._channel.send(Note(text=text))


def _trained_already(trainer: Trainer, checkpoint: Path) -> TrainOutput:
    """Bring a Trainer to where its training had ended: the weights and the state that the script would find then."""
    state = trainer.state = TrainerState.load_from_json(str(checkpoint / _STATE_FILE))
    best = checkpoint.with_name(f"checkpoint-{state.best_global_step}")
    load_trained(trainer, best if trainer.args.load_best_model_at_end and best.is_dir() else checkpoint)
    return TrainOutput(trainer.state.global_step, 0.0, {})
