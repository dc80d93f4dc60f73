"""What a rehearsal runs for a trial: its Trainer is made as for the trial itself, and trained.

It is imported once the virtual GPU is there, because transformers is imported with it.
"""

from dryfit.training.own_trainer import make_trainer
from dryfit.training.rehearsed_plan import rehearsed_trial


def train() -> None:
    """Make the Trainer of the trial that the environment names, and train it; the rehearsal ends it.

    Raises:
        ObjectiveError: The user's function makes no Trainer, one that cannot be searched, or one that cannot be changed
            as the rehearsal asks.
    """
    call, trial = rehearsed_trial()
    trainer, _ = make_trainer(call.calling, trial, call.changed)
    trainer.train()
