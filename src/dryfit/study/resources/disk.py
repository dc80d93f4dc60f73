"""The disk space that a study takes at most, checked before it starts. Pure, but for :func:`taken_bytes`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dryfit.core.errors import MachineError
from dryfit.core.text.units import gib
from dryfit.store.layout import StudyLayout
from dryfit.study.resources.retention import KEEP_NONE, most_kept
from dryfit.study.trials.context import StudyContext
from dryfit.study.trials.trial_config import possible_values

_GENERATIONS = 3
"""Resumable checkpoints of a trial: the two that stay, whichever attempts wrote them, and the next while it is written.

An earlier attempt's go as soon as the control process hears of a new one (`attempt_files.drop_superseded`).
"""

_STATE_PER_WEIGHT = {"sgd": 1, "lion": 1, "adafactor": 1, "adamw8bit": 1, "paged_adamw8bit": 1}
_STATE_PER_WEIGHT_ELSE = 2
"""Bytes of optimizer state at most for each byte of fp32 weights; two moments unless listed."""


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """The disk space of a study's trials at most; logs and tokens are small beside it.

    Attributes:
        weights_bytes: The weights of one trial: those of the largest encoder, in fp32.
        state_bytes: Its optimizer's state.
        kept: Ended trials whose weights stay.
        running: Trials side by side.
        best_files: Best weights of a running trial: those that ended attempts left, those of the running one, and
            better ones while they are written. None with folds.
    """

    weights_bytes: int
    state_bytes: int
    kept: int
    running: int
    best_files: int = 3

    def with_folds(self, folds: int) -> "DiskNeed":
        """Return the need of a study with so many folds: with more than one, trials leave no weights."""
        return self if folds == 1 else replace(self, kept=0, best_files=0)

    @property
    def kept_bytes(self) -> int:
        """What ended trials keep."""
        return self.kept * self.weights_bytes

    @property
    def running_bytes(self) -> int:
        """What running trials take: best weights, and checkpoints to go on from."""
        checkpoint_bytes = self.weights_bytes + self.state_bytes
        return self.running * (self.best_files * self.weights_bytes + _GENERATIONS * checkpoint_bytes)

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.kept_bytes + self.running_bytes


def disk_need(
    weights_bytes: Sequence[int], optimizers: Sequence[str], *, keep: str, trials: int, parallel: int
) -> DiskNeed:
    """Return an upper bound of a study's disk space.

    Args:
        weights_bytes: Of each encoder that a trial may train; none known: 0 is needed.
        optimizers: ``optim.name`` of each optimizer that a trial may use.
        keep: ``runtime.keep``.
        trials: The study's total.
        parallel: Most trials side by side.
    """
    largest_bytes = max(weights_bytes, default=0)
    state = max((_STATE_PER_WEIGHT.get(name, _STATE_PER_WEIGHT_ELSE) for name in optimizers), default=0)
    most = most_kept(keep)
    return DiskNeed(
        weights_bytes=largest_bytes,
        state_bytes=state * largest_bytes,
        kept=trials if most is None else min(most, trials),
        running=min(parallel, trials),
    )


def study_need(study: StudyContext) -> DiskNeed:
    """Return an upper bound of a study's disk space over all models and optimizers of its space."""
    config = study.config
    return disk_need(
        list(study.resolved.weights_bytes.values()),
        possible_values(config, study.space, "optim.name"),
        keep=config.runtime.keep,
        trials=config.study.trials,
        parallel=study.parallelism.most,
    ).with_folds(config.data.folds)


def what_fits(need: DiskNeed, free_bytes: int) -> str:
    """Return the smallest change that makes a study fit its disk; empty if none does.

    Args:
        need: The need without a change.
        free_bytes: What is free, its own files included.
    """
    if need.running_bytes <= free_bytes:
        kept = (free_bytes - need.running_bytes) // max(1, need.weights_bytes)
        return f"--set runtime.keep={f'best:{kept}' if kept else KEEP_NONE}"
    alone = replace(need, kept=0, running=1)
    running = free_bytes // max(1, alone.running_bytes)
    keep = f"--set runtime.keep={KEEP_NONE} " if need.best_files else ""  # with folds there are no weights to keep
    return f"{keep}--set runtime.parallel={running}" if running else ""


def check_disk(need: DiskNeed, *, free_bytes: int, taken_bytes: int, place: Path) -> None:
    """Refuse a study that does not fit its disk.

    Args:
        need: The need of the study.
        free_bytes: What is free on its disk.
        taken_bytes: What its trials have there already; a part of the need.
        place: Its folder, for the message.

    Raises:
        MachineError: There is too little, with numbers and what would fit.
    """
    usable_bytes = free_bytes + taken_bytes
    if need.total_bytes <= usable_bytes:
        return
    kept = f"{need.kept} kept x {gib(need.weights_bytes)} = {gib(need.kept_bytes)}"
    running = f"{need.running} running = {gib(need.running_bytes)} (best weights, checkpoints with optimizer state)"
    fits = what_fits(need, usable_bytes)
    raise MachineError(
        f"checking the disk under {place}",
        f"the study takes up to {gib(need.total_bytes)}: {kept}, {running}; "
        f"there are {gib(free_bytes)} free, and {gib(taken_bytes)} its own already",
        allowed="a disk with room for that",
        hint=f"it fits with {fits}; or free some space" if fits else "free some space, or put the study elsewhere",
    )


def taken_bytes(layout: StudyLayout) -> int:
    """Return the bytes of trials' weights and checkpoints; files that vanish meanwhile do not count."""
    total_bytes = 0
    for pattern in ("*/best/*", "*/checkpoints/*/*", "*/attempt-*/best/*", "*/attempt-*/checkpoints/*/*"):
        for path in layout.trials.glob(pattern):
            try:
                total_bytes += path.stat().st_size
            except FileNotFoundError:
                continue
    return total_bytes
