"""What a rehearsal runs for a trial of a script: the script as for the trial itself, with nobody to report to."""

import functools
import importlib
import os
from pathlib import Path
from typing import Any, Final

from dryfit.gpu.import_hooks import when_imported
from dryfit.gpu.training_arguments import ArgumentWatch
from dryfit.settings.user_code import CommandTemplate
from dryfit.training.current_trial import begin
from dryfit.training.objective import run_script, seed_libraries
from dryfit.training.rehearsed_plan import rehearsed_trial
from dryfit.training.script import values_of, variables_of
from dryfit.training.script_arguments import ArgumentReads

_SETUP: Final = "dryfit.training.own_trainer"


def train() -> None:
    """Run the script of the trial that the environment names; the rehearsal ends it.

    Raises:
        ObjectiveError: Its parser refuses the command, or its Trainer cannot be changed as the rehearsal asks.
    """
    call, trial = rehearsed_trial()
    calling, folder = call.calling, trial.folder
    os.environ.update(variables_of(calling, folder))
    begin(trial)
    command, values = CommandTemplate.parse(calling.objective.function), values_of(calling, folder)
    ArgumentReads(command.options(), values, None if command.names_output else str(folder)).install()
    watch = ArgumentWatch(call.changed)
    watch.install()
    when_imported("transformers.trainer", lambda module: _check_changed(module.Trainer, watch))
    seed_libraries(calling.seed)
    run_script(command, Path(calling.objective.paths[0]), command.arguments(values))


def _check_changed(trainer_class: Any, watch: ArgumentWatch) -> None:
    """Refuse to train a Trainer that cannot be changed so, as the trial does."""
    train = trainer_class.train

    @functools.wraps(train)
    def checked(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        setup = importlib.import_module(_SETUP)  # it imports transformers
        setup.demand_changed(trainer, watch.overrides, watch.replaced)
        setup.adapt(trainer, Path(trainer.args.output_dir))
        return train(trainer, *args, **kwargs)

    trainer_class.train = checked
