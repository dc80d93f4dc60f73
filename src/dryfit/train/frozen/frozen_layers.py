"""An encoder whose frozen layers take their outputs from elsewhere instead of computing them.

The embeddings are computed as ever: they are cheap, and what a model makes beside them (masks, relative positions) is
then as it always is. Of the frozen layers, the last one returns the states, and the others pass on what they are given.

Dimension suffixes: ``B`` rows, ``L`` tokens, ``D`` encoder width.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol, final

import torch
from torch import nn

from dryfit.tasks.base import Batch
from dryfit.tasks.heads import EncoderModel, encoder_parts
from dryfit.train.frozen.distinct_rows import row_digest
from dryfit.train.frozen.states_file import NoStatesError

_TEXT_INPUTS: Final = frozenset({"input_ids", "attention_mask", "token_type_ids"})


class Source(Protocol):
    """Gives hidden states of rows by their content."""

    def states(self, digests: Sequence[bytes], length: int) -> torch.Tensor | None:
        """Return the states of some rows, (B, ``length``, D), zeros behind each row's end; None where one is missing.

        Args:
            digests: Of each row, by :func:`~dryfit.train.frozen.distinct_rows.row_digest`.
            length: Tokens of the batch.
        """
        ...


class _ReachedError(Exception):
    """The last frozen layer has computed: what follows is not needed."""


@final
class FrozenLayers:
    """The frozen layers of a model's encoder.

    Args:
        model: On the CPU, with its weights, frozen.
        count: How many of its first layers are frozen, at least 1.
        autocast: Number format of its forward pass in training; None: that of its weights.

    Attributes:
        model: As given; so are ``count``, and ``autocast`` as ``number_format``.
        served: Forward passes that took states instead of computing them.
    """

    def __init__(self, model: EncoderModel, count: int, autocast: torch.dtype | None = None) -> None:
        self.model = model
        self.count = count
        self.served = 0
        self.number_format = autocast
        self._layers = _first_layers(model, count)
        self._is_tuple = [False] * count
        self._source: Source | None = None
        self._missed: Callable[[], None] | None = None
        self._current: torch.Tensor | None = None
        self._reached: list[torch.Tensor] | None = None

    @contextmanager
    def connected(self) -> Generator[None]:
        """Stand in for the layers' own ``forward``; behind this they are as they were."""
        encoder = self.model.encoder
        hooks = (
            encoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            encoder.register_forward_hook(self._end, always_call=True),
        )
        before = [layer.__dict__.get("forward") for layer in self._layers]
        for index, layer in enumerate(self._layers):
            layer.forward = self._standing_in(index, layer.forward)
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, before, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward
            for hook in hooks:
                hook.remove()

    def serve(self, source: Source, missed: Callable[[], None] | None = None) -> None:
        """Take states from a source from now on.

        Args:
            source: What it lacks is computed.
            missed: Called once, when it lacks a row of a batch that is trained on.
        """
        self._source, self._missed = source, missed

    def compute(self, batch: Batch) -> torch.Tensor:
        """Return what the last frozen layer gives, (B, L, D), computed in the model's present mode, without gradients.

        Args:
            batch: Model inputs, (B, L) each.

        Raises:
            NoStatesError: The layers are not run one after another, or give more than hidden states.
        """
        source, self._source, self._reached = self._source, None, []
        try:
            self._vectors(batch)
        except _ReachedError:
            states = self._reached[0]
            if states.shape[:-1] != batch["input_ids"].shape:
                raise NoStatesError("its hidden states are not (rows, tokens, width)") from None
            return states
        finally:
            self._source, self._reached = source, None
        raise NoStatesError("its layers are not run one after another")

    def difference(self, batch: Batch, source: Source) -> float:
        """Return how far outputs with a source's states are from computed ones, relative to the largest number.

        Compared are the last hidden states, and, in training mode, what the last frozen layer gives: with dropout
        before it, that is no function of the row.

        Args:
            batch: Model inputs of rows that the source has.
            source: Gives their states.

        Raises:
            NoStatesError: The source is not asked, or has not what it is asked for.
        """
        real_BL = batch["attention_mask"].bool()
        training, served, before = self.model.training, self.served, self._source
        try:
            self._source = None
            self.model.train()
            with torch.random.fork_rng(devices=[]):
                frozen = self.compute(batch)[real_BL]
            self.model.eval()
            computed, states = self._vectors(batch)[real_BL], self.compute(batch)[real_BL]
            self._source = source
            taken = self._vectors(batch)[real_BL]
        finally:
            self._source = before
            self.model.train(training)
        if self.served == served:
            raise NoStatesError("its encoder is not called with tokens and a mask")
        return max(_distance(frozen, states), _distance(taken, computed))

    def _vectors(self, batch: Batch) -> torch.Tensor:
        types_BL = batch.get("token_type_ids")
        with torch.no_grad(), self._context():
            return self.model.token_vectors(batch["input_ids"], batch["attention_mask"], types_BL)

    def _context(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=self.number_format, enabled=self.number_format is not None)

    def _begin(self, _encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._current = None
        if self._source is None:
            return
        if not args:
            self._current = self._states(self._source, kwargs)
        if self._current is not None:
            self.served += 1
        elif self.model.training and self._missed is not None:
            missed, self._missed = self._missed, None
            missed()

    def _end(self, _encoder: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._current = None

    def _states(self, source: Source, given: dict[str, Any]) -> torch.Tensor | None:
        """Return the states of a forward pass's rows; None where it is not one of such rows."""
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        ids_BL, mask_BL = tensors.get("input_ids"), tensors.get("attention_mask")
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        if ids_BL is None or mask_BL is None or not tensors.keys() <= _TEXT_INPUTS or autocast != self.number_format:
            return None
        lengths_B = mask_BL.sum(dim=1)
        if not torch.equal(mask_BL.bool(), torch.arange(ids_BL.shape[1]) < lengths_B[:, None]):
            return None  # its padding stands elsewhere
        types_BL = tensors.get("token_type_ids")
        ids_BL, types_BL = ids_BL.int(), None if types_BL is None else types_BL.to(torch.uint8)
        digests = [
            row_digest(ids_BL[row, :length], None if types_BL is None else types_BL[row, :length])
            for row, length in enumerate(lengths_B.tolist())
        ]
        return source.states(digests, ids_BL.shape[1])

    def _standing_in(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        is_last = index == len(self._layers) - 1

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self._current is not None:
                hidden_BLD = self._current if is_last else args[0] if args else kwargs["hidden_states"]
                return (hidden_BLD, None) if self._is_tuple[index] else hidden_BLD
            output = forward(*args, **kwargs)
            if self._reached is not None:
                self._learn(index, output)
                if is_last:
                    self._reached.append(output[0] if self._is_tuple[index] else output)
                    raise _ReachedError
            return output

        return stand_in

    def _learn(self, index: int, output: Any) -> None:
        """Learn in which form a layer returns its hidden states."""
        self._is_tuple[index] = isinstance(output, tuple)
        if not isinstance(output, torch.Tensor) and not (
            isinstance(output, tuple) and len(output) == 2 and output[1] is None
        ):
            raise NoStatesError("its layers give more than hidden states")


def _first_layers(model: EncoderModel, count: int) -> list[nn.Module]:
    layers = model.encoder.get_submodule(encoder_parts(model.encoder).path)
    assert isinstance(layers, nn.ModuleList)
    return list(layers[:count])


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    most = max(float(other.abs().max()), 1e-30)
    return float((one.double() - other.double()).abs().max()) / most
