"""How much disk a study needs: a rough count of what its trials leave behind, from the sizes of its models."""

from dataclasses import dataclass
from typing import Final

_FLOAT_BYTES: Final = 4
_CHECKPOINTS_KEPT: Final = 2
_CHECKPOINTS_IN_WRITING: Final = 1
_SMALL_FILES_BYTES: Final = 1 << 20

STATE_NUMBERS: Final = {
    "adamw": 2.0,
    "radam": 2.0,
    "nadam": 2.0,
    "adamw8bit": 0.6,
    "adafactor": 0.1,
    "sgd": 1.0,
    "lion": 1.0,
}
"""fp32 numbers that each optimizer keeps for a trained parameter, rounded up."""


@dataclass(frozen=True, slots=True)
class NeededDisk:
    """What a study's files take at most, in bytes.

    Attributes:
        checkpoints_bytes: Of the trials that run side by side; gone when they end.
        kept_bytes: Weights of the best trials, and of those that run.
        tokens_bytes: The token cache.
        other_bytes: Logs, messages and the ledger.
    """

    checkpoints_bytes: int
    kept_bytes: int
    tokens_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.checkpoints_bytes + self.kept_bytes + self.tokens_bytes + self.other_bytes


def needed_disk(
    parameters: int, *, optimizers: tuple[str, ...], parallel: int, keep: int, trials: int, tokens_bytes: int = 0
) -> NeededDisk:
    """Count what a study writes, from above.

    A checkpoint holds fp32 weights and the optimizer's state; two are kept while a third is written. A running trial
    also has the weights of its best validation, and ``keep`` ended ones have theirs.

    Args:
        parameters: Of the largest model.
        optimizers: Those that a trial may use.
        parallel: Trials side by side.
        keep: Trials whose weights stay.
        trials: All that are to be run; each leaves about a MiB of logs.
        tokens_bytes: What the token cache takes, or will.
    """
    weights_bytes = parameters * _FLOAT_BYTES
    state = max((STATE_NUMBERS.get(name, 2.0) for name in optimizers), default=2.0)
    checkpoint_bytes = round(weights_bytes * (1 + state))
    return NeededDisk(
        checkpoints_bytes=parallel * (_CHECKPOINTS_KEPT + _CHECKPOINTS_IN_WRITING) * checkpoint_bytes,
        kept_bytes=(parallel + keep) * weights_bytes,
        tokens_bytes=tokens_bytes,
        other_bytes=trials * _SMALL_FILES_BYTES,
    )
