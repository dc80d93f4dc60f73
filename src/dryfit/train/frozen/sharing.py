"""Compute what a trial's frozen layers give for each row once, and share it with all trials of the study.

Rows are computed one at a time, without padding: their states are a function of the row, whatever batch meets them.
Before anything is written, two rows are compared with the step as it is otherwise computed.

Dimension suffixes: ``L`` tokens, ``D`` encoder width.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from dryfit.core.channel import ChildChannel
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.text.units import gib
from dryfit.core.wire import Note
from dryfit.meta.loading.frozen_weights import DTYPES
from dryfit.tasks.heads import EncoderModel
from dryfit.train.frozen.distinct_rows import Row, distinct_rows, padded_batch
from dryfit.train.frozen.frozen_layers import FrozenLayers
from dryfit.train.frozen.states_file import FOLDER, NoStatesError, StatesFile, StatesFolder, StatesLayout
from dryfit.train.frozen.states_key import states_key
from dryfit.train.run import TrialParts

_ASK_EVERY_S: Final = 1.0
_MISSED: Final = "a batch has rows of which it is not known what the frozen layers give: they are computed in each step"


@contextmanager
def frozen_layers_shared(parts: TrialParts) -> Generator[None]:
    """Let a trial's frozen layers take what they give from the study's cache, if the settings and the model allow it.

    Where they do not, each step computes it, and the trial's story says why. Behind this the model is as it was.

    Args:
        parts: The trial, its model on its device, with its weights and frozen.
    """
    regularization = parts.request.config.settings.regularization
    if not regularization.freeze_layers or regularization.frozen_dropout or not parts.request.plan.frozen_cache_bytes:
        yield
        return
    with ExitStack() as stack:
        try:
            said = _shared(parts, regularization.freeze_layers, stack)
        except NoStatesError as reason:
            stack.close()
            said = f"the frozen layers are computed in each step: {reason}"
        parts.channel.send(Note(text=said))
        yield


def _shared(parts: TrialParts, count: int, stack: ExitStack) -> str:
    """Connect a trial's frozen layers with their states, and return what is said of it."""
    request, channel = parts.request, parts.channel
    model = _encoder_model(parts)
    precision = request.config.settings.train.precision
    layers = FrozenLayers(model, count, DTYPES[precision] if precision.is_half else None)
    stack.enter_context(layers.connected())
    stack.callback(model.train, model.training)
    model.eval()
    rows = distinct_rows((parts.train, parts.validation), types=model.takes_types)
    check_soundness(layers, rows)
    folder = StatesFolder(Path(request.cache_dir) / FOLDER, request.plan.frozen_cache_bytes)
    file, seconds = states_of(layers, rows, folder, channel.beat, _StopRequest(channel))
    stack.enter_context(file)
    layers.serve(file, lambda: channel.send(Note(text=_MISSED)))
    how = "read from the study's cache" if seconds is None else f"computed in {seconds:.1f} s, and kept for all trials"
    return f"what {count} frozen layers give for {len(rows)} rows ({gib(file.layout.size_bytes)}): {how}"


def states_of(
    layers: FrozenLayers,
    rows: Mapping[bytes, Row],
    folder: StatesFolder,
    beat: Callable[[], None] = lambda: None,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[StatesFile, float | None]:
    """Return a file with the states of some rows, and the seconds that computing them took; None: it was there.

    Args:
        layers: Of a model in eval mode.
        rows: By :func:`distinct_rows`.
        folder: The files of the study.
        beat: Called for each row, as a sign of life.
        stopped: Whether the trial was asked to stop.

    Raises:
        NoStatesError: There is none, and none can be written.
    """
    layout = _layout(layers, rows)
    key = states_key(layers, layout)
    file = folder.existing(key, layout)
    if file is not None:
        return file, None
    with folder.writing(beat, stopped):
        file, began_s = folder.existing(key, layout), time.monotonic()
        if file is not None:
            return file, None  # another trial has written it meanwhile
        file = folder.write(key, layout, _computed(layers, rows.values(), beat, stopped))
        return file, time.monotonic() - began_s


def _encoder_model(parts: TrialParts) -> EncoderModel:
    """Return the trial's model.

    Raises:
        NoStatesError: Its frozen layers cannot be left out.
    """
    plan, model = parts.request.plan, parts.model
    if plan.device is not DeviceKind.CPU:
        raise NoStatesError("their outputs are kept for trials on the CPU")
    if plan.processes > 1:
        raise NoStatesError("several processes train the trial")
    if plan.checkpointing and plan.reentrant:
        raise NoStatesError("with execution.reentrant = true a gradient goes through them")
    if not isinstance(model, EncoderModel) or model.encoder_paths != ("encoder",):
        raise NoStatesError("the model has not one encoder")
    return model


def check_soundness(layers: FrozenLayers, rows: Mapping[bytes, Row]) -> None:
    """Compare the shortest and the longest row, padded, with and without states computed for each alone.

    Args:
        layers: Of a model in eval mode.
        rows: By :func:`distinct_rows`.

    Raises:
        NoStatesError: The layers cannot be left out of this model, or what they give depends on padding or on dropout.
    """
    shown = dict([*rows.items()][:: max(1, len(rows) - 1)])
    states = {digest: layers.compute(padded_batch([row]))[0] for digest, row in shown.items()}
    apart = layers.difference(padded_batch([*shown.values()]), _InMemory(states))
    dtype = layers.number_format or next(iter(states.values())).dtype
    if not apart <= torch.finfo(dtype).eps ** 0.5:
        raise NoStatesError(f"in this model what they give is no function of the row alone (it differs by {apart:.1e})")


@dataclass(frozen=True, slots=True)
class _InMemory:
    """States of a few rows (L, D) by their digests."""

    rows: Mapping[bytes, torch.Tensor]

    def states(self, digests: Sequence[bytes], length: int) -> torch.Tensor | None:
        """Return their states, padded; all rows are there."""
        padded_BLD = pad_sequence([self.rows[digest] for digest in digests], batch_first=True)
        return padded_BLD if padded_BLD.shape[1] == length else None


class _StopRequest:
    """Whether the trial was asked to stop, looked up once a second."""

    def __init__(self, channel: ChildChannel) -> None:
        self._channel = channel
        self._asked_s = time.monotonic()

    def __call__(self) -> bool:
        """Return it; False between two looks."""
        if time.monotonic() - self._asked_s < _ASK_EVERY_S:
            return False
        self._asked_s = time.monotonic()
        return self._channel.stop_requested() is not None


def _computed(
    layers: FrozenLayers, rows: Iterable[Row], beat: Callable[[], None], stopped: Callable[[], bool]
) -> Iterator[torch.Tensor]:
    """Yield the states of each row, (L, D)."""
    for row in rows:
        beat()
        if stopped():
            raise NoStatesError("the trial was asked to stop")
        yield layers.compute(padded_batch([row]))[0]


def _layout(layers: FrozenLayers, rows: Mapping[bytes, Row]) -> StatesLayout:
    shortest_LD = layers.compute(padded_batch([next(iter(rows.values()))]))[0]
    lengths = [len(ids_L) for ids_L, _ in rows.values()]
    starts_R = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    index = {digest: number for number, digest in enumerate(rows)}
    return StatesLayout(index, starts_R, shortest_LD.shape[-1], shortest_LD.dtype)
