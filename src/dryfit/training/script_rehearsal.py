"""What a rehearsal runs for a trial of a script: the script as for the trial itself, with nobody to report to."""

import functools
import importlib
from pathlib import Path
from typing import Any, Final

from dryfit.gpu.training_arguments import ArgumentWatch
from dryfit.training.rehearsed_plan import rehearsed_trial
from dryfit.training.script import TrialScript

_SETUP: Final = "dryfit.training.own_trainer"


def train() -> None:
    """Run the script of the trial that the environment names; the rehearsal ends it.

    Raises:
        ObjectiveError: Its parser refuses the command, or its Trainer cannot be changed as the rehearsal asks.
    """
    call, trial = rehearsed_trial()
    script = TrialScript(trial, call.calling, call.changed)
    script.connect(lambda module: _check_changed(module.Trainer, script.planned))
    script.run()


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
