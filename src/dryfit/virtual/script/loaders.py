"""Watch a script's data loaders: which feed training and which evaluation, where an epoch ends early, what comes first.

The largest batch comes first, and once more when the optimizer has its state, in place of another one. After enough
optimizer steps a loader that fed training ends its epoch, as if its data had ended there, so that the script goes on to
its evaluation and saving. Asked for another epoch after an evaluation, it feeds one more step, and ends the script.
An evaluation ends after some batches. Host memory is not pinned: there is no driver to do it.

A loader feeds training when an optimizer takes a step on the batch that it gave last. It feeds an evaluation when the
modules that are called between two of its batches are in evaluation mode, or gradients are off.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, SequentialSampler

from dryfit.core.jobs.rehearsal import LargestBatch
from dryfit.core.text.units import gib
from dryfit.virtual.import_hooks import when_imported
from dryfit.virtual.script.largest_batch import Found, find_largest
from dryfit.virtual.script.optimizer_steps import OptimizerSteps

EVALUATION_BATCHES = 4
"""Batches after which an evaluation is ended."""

_ADAPTERS = ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader")
"""Accelerate's loaders: they look like a ``DataLoader`` and are none."""


class Stock(NamedTuple):
    """What is allocated on the device, and how many events led to it.

    Attributes:
        held_since: Gives the sizes of what was allocated since an event and is still there.
    """

    allocated_bytes: int = 0
    event: int = 0
    held_since: Callable[[int], Sequence[int]] = lambda _: ()


class KeptOfBatch(NamedTuple):
    """What an evaluation keeps of each batch.

    Attributes:
        bytes: Of the device's memory.
        others: Batches that were left out; None: not known.
        since: Number of events before the last batch was evaluated.
        until: The same after it.
    """

    bytes: int
    others: int | None
    since: int
    until: int


class LoaderWatch:
    """What is known of a script's data loaders.

    Attributes:
        notes: What was left out, in words.
        largest: The largest batch of the loader that feeds training.
        kept: What the evaluation that was cut and keeps most keeps of each batch; None: none keeps anything.
    """

    def __init__(self, steps: OptimizerSteps, *, worst_batch: bool, stock: Callable[[], Stock]) -> None:
        self.notes: dict[str, None] = {}
        self.largest: LargestBatch | None = None
        self._steps = steps
        self._worst_batch = worst_batch
        self._stock = stock
        self.kept: KeptOfBatch | None = None
        self._found: WeakKeyDictionary[DataLoader[Any], Found | str] = WeakKeyDictionary()
        self._training: WeakSet[Any] = WeakSet()
        self._feeds: WeakSet[Any] = WeakSet()
        self._drawn_first: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._repeats: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()
        self._evaluated_at = 0
        """Steps before the first evaluation that came after one; 0: none came."""
        self._went_past = False
        self._last: _Watched | None = None
        self._winding_down_from: int | None = None
        self._drawing = _Drawing()

    def install(self) -> None:
        """Watch every loader of the process from now on, and what modules do with their batches."""
        watch = self

        def subclassed(cls: type[DataLoader[Any]], **kwargs: Any) -> None:
            super(DataLoader, cls).__init_subclass__(**kwargs)
            watch._wrap(cls)

        for known in {DataLoader, *_subclasses(DataLoader)}:
            self._wrap(known)
        DataLoader.__init_subclass__ = classmethod(subclassed)  # pyright: ignore[reportAttributeAccessIssue]
        when_imported("accelerate.data_loader", self._wrap_adapters)
        register_module_forward_pre_hook(self.module_called)

    def before_step(self) -> None:
        """Learn which loader feeds training; end the script where enough steps were made and none winds down.

        Raises:
            RehearsalDone: Another step would be of no use.
        """
        if self._steps.done:
            # A loader around the one that was cut may have kept a batch: its step belongs to the natural end.
            if self._winding_down_from is None or self._steps.number > 2 * self._winding_down_from:
                self._steps.end_script()
        elif self._last is not None and not self._last.evaluates:
            self._last.trains = True
            self._training.add(self._last.loader)
            for loader in self._last.sources:
                self._learned(loader)

    @property
    def evaluating(self) -> bool:
        """Whether modules are evaluating the batch that was given last."""
        return self._last is not None and self._last.evaluates

    def draw(self, watched: "_Watched") -> Any:
        """Return an iterator's next batch.

        Raises:
            StopIteration: Its data have ended, or its epoch ends here.
        """
        if self._drawing.depth:  # the loader within a loader
            self._drawing.sources.add(watched.loader)
            return watched.next_batch()
        watched.takes_stock(self._stock())
        if watched.evaluated:
            self._evaluated()
        if self._steps.done and watched.trains:
            if self._went_past:
                self._steps.end_script()
            self._winding_down_from = self._steps.number
            watched.ends_here()
            raise StopIteration
        several = watched.evaluated >= EVALUATION_BATCHES
        if several and watched.evaluated != _length(watched.loader) and self._is_evaluation(watched):
            self.notes[_shortened(watched.loader, watched.kept_bytes)] = None
            self._keep(watched)
            watched.ends_here()
            raise StopIteration
        self._drawing.sources = {watched.loader}
        with self._drawing.nested():
            batch = watched.next_batch()
        watched.sources = self._drawing.sources
        self._last, self._winding_down_from = watched, None
        return batch

    def _keep(self, watched: "_Watched") -> None:
        if watched.kept_bytes > (self.kept.bytes if self.kept is not None else 0):
            length = _length(watched.loader)
            others = None if length is None else length - EVALUATION_BATCHES
            self.kept = KeptOfBatch(watched.kept_bytes, others, watched.since, watched.stock.event)

    def _is_evaluation(self, watched: "_Watched") -> bool:
        """Return whether an iterator whose batches are evaluated feeds no rollout for training, as PPO's do."""
        if watched.trains or (watched.loader in self._training and torch.is_grad_enabled() and not self._steps.done):
            return False
        return self._steps.number > 0 or any(map(_keeps_order, watched.sources))

    def goes_past_evaluation(self) -> bool:
        """Whether one more step is to be seen: no step was made after an evaluation yet, and training goes on."""
        if self._went_past or 0 < self._evaluated_at < self._steps.number:
            return False
        self._went_past = True
        self._repeats = WeakKeyDictionary(dict.fromkeys(self._repeats, 1))
        self._steps.see_one_more()
        return True

    def _evaluated(self) -> None:
        self._evaluated_at = self._evaluated_at or self._steps.number

    def _go_past_evaluation(self) -> None:
        """Let another epoch begin where an evaluation came before; end the script where none did.

        Raises:
            RehearsalDone: Another step would be of no use.
        """
        if not (self._evaluated_at and self.goes_past_evaluation()):
            self._steps.end_script()

    def once_more(self, loader: Any, batch: Any) -> Any:
        """Return the largest batch in place of one that was drawn, once the optimizer has its state.

        Of several batches a step, which may be no more than drawn ahead, the second one meets gradients too.
        """
        if self._steps.number == 0:
            self._drawn_first[loader] = self._drawn_first.get(loader, 0) + 1
            return batch
        found = self._found.get(loader) if isinstance(loader, DataLoader) else None
        if not isinstance(found, Found) or loader not in self._feeds:
            return batch
        left = self._repeats.setdefault(loader, min(self._drawn_first.get(loader, 0), 2))
        if not left:
            return batch
        self._repeats[loader] = left - 1
        try:
            return found.again()
        except Exception as error:  # noqa: BLE001  # the script's own data set and collator may raise anything
            self.notes[f"the largest batch came once: making it again raised {type(error).__name__}: {error}"] = None
            return batch

    def _wrap(self, cls: Any) -> None:
        """Let a class's iterators be watched, where it has its own."""
        original = vars(cls).get("__iter__")
        if original is None:
            return

        @wraps(original)
        def iterate(loader: Any) -> Iterator[Any]:
            again = self._steps.done and loader in self._training and torch.is_grad_enabled()
            if again and not self._drawing.depth:
                self._go_past_evaluation()
            loader.pin_memory = False
            found = self._look(loader) if cls is DataLoader else None
            with self._drawing.nested():
                inner = original(loader)
            return _Watched(self, loader, inner, found, makes_batches=cls is DataLoader)

        cls.__iter__ = iterate

    def _wrap_adapters(self, module: Any) -> None:
        for name in _ADAPTERS:
            self._wrap(getattr(module, name))

    def _look(self, loader: DataLoader[Any]) -> Found | None:
        """Return what a loader has to give first: whenever it begins before any step, or shuffles and is new."""
        if not self._worst_batch or not torch.is_grad_enabled():
            return None
        if self._steps.number and (loader in self._found or _keeps_order(loader)):
            return None  # made after a step, by an out-of-memory error that was caught, it trains anew
        found = self._found[loader] = find_largest(loader)
        return found if isinstance(found, Found) else None

    def _learned(self, loader: DataLoader[Any]) -> None:
        """Take over what was found of a loader that feeds training."""
        self._feeds.add(loader)
        found = self._found.get(loader)
        if isinstance(found, Found):
            self.largest = found.answer
        note = found.note if isinstance(found, Found) else found
        if note:
            self.notes[note] = None

    def module_called(self, module: nn.Module, _args: object = ()) -> None:
        """Note that a module is called on the batch that was given last."""
        trains = module.training and torch.is_grad_enabled()
        if self._last is not None:
            self._last.is_used(trains=trains)
        elif not trains:
            self._evaluated()


class _Drawing(threading.local):
    """What a thread is drawing batches from: a loader may draw from another one."""

    def __init__(self) -> None:
        self.depth = 0
        self.sources: set[Any] = set()

    @contextmanager
    def nested(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class _Watched:
    """A loader's iterator.

    Attributes:
        trains: Whether an optimizer took a step on a batch of it.
        evaluated: Batches that were evaluated.
        kept_bytes: Of the device's memory, that each batch evaluated left allocated.
        stock: What was there when it was last looked at; since: the number of events the time before.
        sources: The loaders that its last batch came through.
    """

    def __init__(
        self, watch: LoaderWatch, loader: Any, inner: Iterator[Any], found: Found | None, *, makes_batches: bool
    ) -> None:
        self.loader = loader
        self._makes_batches = makes_batches  # a class around torch's makes something else of them
        self.trains = False
        self.evaluated = 0
        self.kept_bytes = 0
        self.stock = Stock()
        self.since = 0
        self.sources: set[Any] = set()
        self._watch = watch
        self._inner = inner
        self._first = None if found is None else (found.batch,)
        self._left_out = -1 if found is None else found.position
        self._drawn = 0
        self._ended = False
        self._trained_on = self._evaluated_on = False

    def __iter__(self) -> "_Watched":
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        return self._watch.draw(self)

    def __len__(self) -> int:
        return len(self._inner)  # pyright: ignore[reportArgumentType]  # torch's own iterators have one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def evaluates(self) -> bool:
        """Whether its last batch was only evaluated so far."""
        return self._evaluated_on and not self._trained_on

    def is_used(self, *, trains: bool) -> None:
        """Remember that a module was called after its last batch."""
        self._trained_on |= trains
        self._evaluated_on |= not trains

    def takes_stock(self, stock: Stock) -> None:
        """Count what became of its last batch, and what an evaluation keeps of each."""
        if self.evaluates:
            self.evaluated += 1
            grown_bytes = stock.allocated_bytes - self.stock.allocated_bytes
            # The first batch also makes what all have in common.
            self.kept_bytes = grown_bytes if self.evaluated <= 2 else min(self.kept_bytes, grown_bytes)
        elif self._trained_on:
            self.evaluated = 0
        self.since, self.stock = self.stock.event, stock
        self._trained_on = self._evaluated_on = False

    def next_batch(self) -> Any:
        """Return the largest batch if it has one to begin with, then the others in their order."""
        if self._first is not None:
            (batch,), self._first = self._first, None
            return self._watch.once_more(self.loader, batch)
        if self._drawn == self._left_out:
            self._draw()
        batch = self._draw()
        return self._watch.once_more(self.loader, batch) if self._makes_batches else batch

    def ends_here(self) -> None:
        """End, and tell a loader of Accelerate's so, as its own end would."""
        self._ended = True
        if isinstance(self._inner, Generator):
            self._inner.close()
        if type(self.loader).__name__ in _ADAPTERS:
            self.loader.end()

    def _draw(self) -> Any:
        batch = next(self._inner)
        self._drawn += 1
        return batch


def _shortened(loader: Any, kept_bytes: int) -> str:
    length = _length(loader)
    cut = f"an evaluation was ended after {EVALUATION_BATCHES}{f' of {length}' if length else ''} batches"
    if kept_bytes <= 0:
        return cut
    others = (length or 0) - EVALUATION_BATCHES
    whole = f": the {others} others would keep {gib(others * kept_bytes)} more" if others > 0 else ""
    return f"{cut}; it keeps {gib(kept_bytes)} of each batch on the device (logits, as a rule){whole}"


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _keeps_order(loader: Any) -> bool:
    sampler = loader.batch_sampler if getattr(loader, "batch_sampler", None) is not None else loader.sampler
    while hasattr(sampler, "batch_sampler") or hasattr(sampler, "sampler"):
        sampler = sampler.batch_sampler if hasattr(sampler, "batch_sampler") else sampler.sampler
    return isinstance(sampler, SequentialSampler)


def _subclasses(cls: type) -> Iterator[type]:
    for known in cls.__subclasses__():
        yield known
        yield from _subclasses(known)
