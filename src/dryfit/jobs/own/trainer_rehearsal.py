"""What a rehearsal runs for a trial: its Trainer is made as for the trial itself, and trained.

It is imported once the virtual GPU is there, because transformers is imported with it.
"""

import os
from pathlib import Path

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import InternalError
from dryfit.core.wire import read_model
from dryfit.jobs.own.made_trainer import make_trainer
from dryfit.jobs.own.objective_trial import Trial
from dryfit.jobs.own.rehearsed_plan import CALL_VARIABLE, RehearsedCall


def train() -> None:
    """Make the Trainer of the trial that the environment names, and train it; the rehearsal ends it.

    Raises:
        ObjectiveError: The user's function makes no Trainer, one that cannot be searched, or one that cannot be changed
            as the rehearsal asks.
    """
    file = Path(os.environ[CALL_VARIABLE])
    call = read_model(file, RehearsedCall)
    if call is None:
        raise InternalError("rehearsing a trial", f"{file} is gone")
    folder = Path(call.calling.checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    channel = ChildChannel(folder, wakeup_fifo=None, placed_at_s=0.0)
    trainer, _ = make_trainer(call.calling, Trial(call.calling, channel), call.changed)
    trainer.train()
