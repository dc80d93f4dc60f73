"""Choice of threads, trials side by side and number format from steps that were measured. Pure."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

from pydantic import Field

from dryfit.config.schema import StudyConfig
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.execution import DeviceKind, DeviceSpec
from dryfit.core.wire import Wire
from dryfit.store.replay import StudyState

_MOST_SIDE_BY_SIDE: Final = 8
"""A sampler learns from trials that have ended: beyond so many at once it knows too little of those before."""

_SPREADS: Final = (1, 2, 4)
_AS_GOOD: Final = 1.05
"""Fewer side by side are taken if they take at most so much longer: they need less memory, and samplers know more."""

_FASTER: Final = 1.1
"""How much faster bf16 must be: less is within what measuring it again changes."""

_BF16_CAPABILITY: Final = (8, 0)
"""The first compute capability with bf16 in its tensor cores (CUDA C++ programming guide, arithmetic instructions)."""


class Way(Wire):
    """A way to run trials on the CPU, or on a GPU one at a time.

    Attributes:
        threads: CPU threads of each trial.
        side_by_side: Trials at once.
    """

    threads: int = Field(ge=1)
    side_by_side: int = Field(ge=1)
    precision: Precision


class MeasuredWay(Wire):
    """The measured speed of one way: the slowest of the concurrent trials."""

    way: Way
    step_s: float = Field(gt=0)

    @property
    def steps_per_s(self) -> float:
        """Steps of all trials side by side in a second."""
        return self.way.side_by_side / self.step_s

    def finish_s(self, trials: int) -> float:
        """Return the seconds until each of some trials has done one step."""
        return math.ceil(trials / self.way.side_by_side) * self.step_s


def divisions(cores: int, loader_workers: int, most: int) -> list[tuple[int, int]]:
    """Return ways to divide a machine's cores, as (threads of a trial, trials side by side), one at a time first.

    Each is one from whose threads the number side by side follows: as many as cores have room for.

    Args:
        cores: CPU cores that trials may use.
        loader_workers: Loader processes of each trial.
        most: Most trials side by side, for want of memory or of trials.
    """
    found: list[tuple[int, int]] = []
    for together in range(1, min(cores, most, _MOST_SIDE_BY_SIDE) + 1):
        threads = cores // together - loader_workers
        if threads >= 1 and cores // (threads + loader_workers) == together:
            found.append((threads, together))
    return [one for one in found if one[1] in _SPREADS or one == found[-1]]


def quickest(measured: Sequence[MeasuredWay], trials: int) -> MeasuredWay:
    """Return the way by which some trials end first; of those nearly as quick the one with the fewest side by side.

    Args:
        measured: At least one way, all of one number format.
        trials: How many are to be run.
    """
    least_s = min(one.finish_s(trials) for one in measured)
    near = [one for one in measured if one.finish_s(trials) <= least_s * _AS_GOOD]
    return min(near, key=lambda one: one.way.side_by_side)


def faster_format(fp32: MeasuredWay, bf16: MeasuredWay | None) -> MeasuredWay:
    """Return the way in bf16 if it was measured, and clearly faster; else that in fp32."""
    return bf16 if bf16 is not None and fp32.step_s >= bf16.step_s * _FASTER else fp32


def in_words(way: Way, precision: Precision, measured: Iterable[MeasuredWay]) -> str:
    """Return the measurements and the chosen settings as text.

    Args:
        way: What was chosen.
        precision: The number format of trials, which may be an earlier session's choice.
        measured: Everything that was measured.
    """
    text = f"{way.side_by_side} trial(s) at once, {way.threads} thread(s) each, {precision}"
    others = [f"{_short(one.way)}: {one.steps_per_s:.2f}" for one in measured]
    return f"{text} (steps a second, threads x trials: {', '.join(others)})"


def _short(way: Way) -> str:
    return f"{way.threads} x {way.side_by_side} {way.precision}"


def has_bf16(device: DeviceKind, spec: DeviceSpec | None, *, cpu: bool) -> bool:
    """Whether a device multiplies in bf16 by instructions of its own.

    Args:
        device: Where trials run.
        spec: The CUDA device; None: not known.
        cpu: Whether the processor does.
    """
    return cpu if device is DeviceKind.CPU else spec is not None and spec.capability >= _BF16_CAPABILITY


def recorded_precision(state: StudyState) -> Precision | None:
    """Return the number format that a study's trials have by its ledger; None: none was decided yet."""
    own = state.generation.comparability.own if state.generations else None
    found = None if own is None else own.get("train.precision")
    return None if found in (None, Precision.AUTO) else Precision(str(found))


def with_precision(config: StudyConfig, precision: Precision | None) -> StudyConfig:
    """Return a configuration with the number format that "auto" stands for.

    Args:
        config: The configuration; returned as it is unless its format is "auto".
        precision: The format; None: not decided yet.
    """
    if config.train.precision is not Precision.AUTO or precision is None:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})
