"""What a trial's process does wrong on a device, for the tests on a GPU: an entry point in the place of training."""

import os
from typing import Any

import torch

from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import DataError
from dryfit.settings.training_messages import TrainRequest, TrainResult
from dryfit.settings.wire import Note, Phase
from dryfit.tasks.guard import BatchGuard
from dryfit.tasks.heads import EncoderWithHead
from dryfit.training.trial_jobs import train

WRONG = "DRYFIT_TEST_WRONG"
"""Variable: ``assert``, ``hang``, ``oom`` or ``context``."""

_THIRD = 3


def run(body: TrainRequest, channel: ChildChannel) -> TrainResult:
    """Train, with one thing wrong in the third training batch."""
    wrong = os.environ[WRONG]
    if wrong == "context":
        before = torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()
        total = float(torch.ones(1024, device="cuda").sum())
        channel.send(Note(text=f"{before} {total} {torch.cuda.device_count()}"))
    else:
        _spoil(wrong, channel)
    return train(body, channel)


def _spoil(wrong: str, channel: ChildChannel) -> None:
    forward: Any = EncoderWithHead.forward
    check = BatchGuard.check_batch
    steps = [0]

    def let_through(self: BatchGuard, batch: Any, rows: Any) -> None:
        try:
            check(self, batch, rows)
        except DataError as error:
            channel.send(Note(text=f"let through: {error.found}"))

    def spoiled(self: EncoderWithHead, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        steps[0] += self.training
        if self.training and steps[0] == _THIRD:
            channel.send(Phase(name="train", step=_THIRD))
            match wrong:
                case "assert":  # an id without an embedding, on the device: nobody sees it on the host
                    input_ids = input_ids.clone()
                    input_ids[1, 0] = 10_000_000
                case "hang":
                    torch.cuda._sleep(1 << 60)
                case "oom":
                    all_bytes = torch.cuda.get_device_properties(0).total_memory
                    torch.empty(2 * all_bytes, dtype=torch.uint8, device="cuda")
        return forward(self, input_ids=input_ids, **inputs)

    BatchGuard.check_batch = let_through  # type: ignore[method-assign]
    EncoderWithHead.forward = spoiled  # type: ignore[method-assign]
