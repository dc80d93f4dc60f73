"""A script's optimizer steps and data loaders: which train, which evaluate, and their largest batch."""

import copy
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from math import ceil, prod
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.optim.optimizer as optimizers
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from dryfit.gpu.import_hooks import when_imported
from dryfit.gpu.script_recorder import TrainingModes
from dryfit.settings.rehearsal_messages import CHARACTERS, LargestBatch
from dryfit.settings.text import gib

# Find the largest batch of a data loader without the script noticing.
#
# Batches are collated on the CPU, in the sampler's order, from a copy of the sampler; the global random numbers of
# torch, numpy and Python are put back. Only map-style data sets, whose rows may be asked for twice, are read. A
# generator of its own that a data set keeps is drawn from.


MOST_BATCHES = 2000
MOST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Found:
    """The largest batch.

    Attributes:
        position: Of the batch in the epoch that is about to begin.
        again: Collates the batch anew: a script may change what it was given.
        mean_size: Elements of a batch, or characters of one of texts: the mean of those that were looked at.
        batches_per_s: That this machine collates, one after the other.
        note: Why no more were looked at; empty where all were, or the number was reached.
    """

    position: int
    batch: Any
    again: Callable[[], Any]
    answer: LargestBatch
    note: str
    mean_size: float
    batches_per_s: float


def find_largest(loader: DataLoader[Any], *, most_s: float = MOST_SECONDS) -> Found | str:
    """Return a loader's largest batch by number of elements, longest text, then bytes; or why it cannot be known.

    The loader's next epoch is as it would have been.
    """
    if isinstance(loader.dataset, IterableDataset):
        return "the largest batch is not known: the data set can be read only once"
    try:
        batches = len(loader)
    except (TypeError, NotImplementedError):
        return "the largest batch is not known: the data loader has no length"
    with _random_numbers_kept():
        try:
            return _search(loader, batches, most_s)
        except Exception as error:  # noqa: BLE001  # the script's own data set and collator may raise anything
            return f"the largest batch is not known: looking for it raised {type(error).__name__}: {error}"


def _collate(loader: DataLoader[Any], indices: Any) -> Any:
    """Return the batch of some rows, as a loader without workers makes it."""
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[indices])
    if getattr(dataset, "__getitems__", None):
        return loader.collate_fn(dataset.__getitems__(indices))
    return loader.collate_fn([dataset[index] for index in indices])


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Put the global random number generators of the CPU back as they were."""
    numpy: Any = sys.modules.get("numpy.random")
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = numpy.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        if numpy is not None:
            numpy.set_state(of_numpy)
        random.setstate(of_python)


def _search(loader: DataLoader[Any], batches: int, most_s: float) -> Found | str:
    began_s = time.monotonic()
    largest: tuple[tuple[int, int, int], int, Any, Any] | None = None
    seen, total, note = 0, 0, ""
    for indices in islice(_copied(loader), min(batches, MOST_BATCHES)):
        batch = _collate(loader, indices)
        tensors = dict(_named_tensors(batch))
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            return "the largest batch is not known: the data set puts tensors on the device"
        size = _size(batch, tensors)
        total += size[0] or size[1]
        if largest is None or size > largest[0]:
            largest = (size, seen, batch, indices)
        seen += 1
        if time.monotonic() - began_s > most_s and seen < batches:
            note = f"the largest batch is that of {seen} of {batches}: {most_s:g} s were up"
            break
    if largest is None or not any(largest[0]):
        return "the largest batch is not known: the data loader gives neither tensors nor texts"
    took_s = max(time.monotonic() - began_s, 1e-9)
    _, position, batch, rows = largest
    shapes = {name: tuple(tensor.shape) for name, tensor in _named_tensors(batch)} or {CHARACTERS: _characters(batch)}
    answer = LargestBatch(shapes=shapes, seen=seen, of=batches, fed_first=True)

    def again() -> Any:
        with _random_numbers_kept():
            return _collate(loader, rows)

    return Found(position, batch, again, answer, note, total / seen, seen / took_s)


def _size(batch: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int, int]:
    """Return the elements of a batch's tensors, the characters of its texts as if padded, and the tensors' bytes."""
    return (
        sum(tensor.numel() for tensor in tensors.values()),
        prod(_characters(batch)),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    )


def _copied(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield what the loader's sampler will yield, from a copy of it; data sets in it are not copied."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    generator = copy.deepcopy(loader.generator)
    copies: dict[int, Any] = {id(loader.dataset): loader.dataset, id(loader.generator): generator}
    inner = sampler
    while inner is not None:
        held = vars(inner) if hasattr(inner, "__dict__") else {}
        copies |= {id(held[name]): held[name] for name in ("data_source", "dataset") if name in held}
        inner = held.get("batch_sampler", held.get("sampler"))
    # A loader's iterator draws a seed for its workers before a sampler draws anything.
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return iter(copy.deepcopy(sampler, copies))


def _characters(batch: Any) -> tuple[int, int]:
    """Return the rows of a batch of texts, and the characters of the longest one."""
    if isinstance(batch, Mapping):  # columns
        columns = [column for column in batch.values() if isinstance(column, list | tuple)]
        rows = list(zip(*columns, strict=False))
    else:
        rows = batch if isinstance(batch, list | tuple) else []
    return len(rows), max(map(_letters, rows), default=0)


def _letters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(_letters, value)) if isinstance(value, list | tuple) else 0


def _named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch: of mappings, sequences, and objects that hold tensors."""
    if isinstance(batch, torch.Tensor):
        yield name or "batch", batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _named_tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, list | tuple):
        for at, value in enumerate(batch):
            yield from _named_tensors(value, f"{name}.{at}" if name else str(at))
    elif not isinstance(batch, str | bytes | int | float | None) and hasattr(batch, "__dict__"):
        for key, value in vars(batch).items():
            if isinstance(value, torch.Tensor | list | tuple | Mapping):
                yield from _named_tensors(value, f"{name}.{key}" if name else key)


# Count the optimizer steps of a script that knows nothing of it.
#
# A step of the script is one of its optimizers: with several (a generator's and a discriminator's), step n begins
# when the first of them makes its n-th. Wrappers (Accelerate's, Lightning's, ``GradScaler``) call the optimizer that
# they wrap, and that one is counted; a step that a scaler skips is none.


PATIENCE = 4
"""Times the steps asked for after which an optimizer that takes none, or few, is waited for no longer; and times that
a script is ended before it is not asked any more."""


class RehearsalDone(BaseException):
    """Enough steps were seen: ends the script, through its ``finally`` blocks and past its ``except Exception``."""


class OptimizerSteps:
    """Counts steps, and says when enough were made.

    Args:
        wanted: Steps that are enough.
        on_end: Called with a step's number after its first optimizer has ended.
        on_ignored: Called where a script catches its end, and goes on.

    Attributes:
        wanted: Steps that are enough.
        number: Steps that have ended: of the optimizer that made most.
        ended: The same, of all optimizers together.
    """

    def __init__(
        self,
        wanted: int,
        on_end: Callable[[int], None],
        on_ignored: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = self.ended = 0
        self.wanted = wanted
        self._on_end = on_end
        self._on_ignored = on_ignored
        self._times_ended = 0
        self._made: WeakSet[Optimizer] = WeakSet()
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._done = False
        self._before_step: Callable[[], None] = lambda: None

    def install(self, before_step: Callable[[], None]) -> None:
        """Watch every optimizer of the process from now on.

        Args:
            before_step: Called before each optimizer's step; what it raises ends the script there.
        """
        self._before_step = before_step

        def begins(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
            if not (_within_its_own_step(optimizer) or _is_part(optimizer)):
                self.begins(optimizer)

        def ends(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
            if not (_within_its_own_step(optimizer) or _is_part(optimizer)):
                self.ends(optimizer)

        original = Optimizer.__init__

        @wraps(original)
        def initialise(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._made.add(optimizer)

        Optimizer.__init__ = initialise  # pyright: ignore[reportAttributeAccessIssue]
        optimizers.register_optimizer_step_pre_hook(begins)
        optimizers.register_optimizer_step_post_hook(ends)

    def begins(self, _optimizer: Optimizer | None = None) -> None:
        """A step begins, of an optimizer or without one; what is raised ends the script there."""
        self._before_step()

    def ends(self, optimizer: Optimizer) -> None:
        """An optimizer's step has ended."""
        self.ended += 1
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if count > self.number:
            self.number = count
            self._on_end(count)

    @property
    def has_optimizer(self) -> bool:
        """Whether the script has made an optimizer."""
        return bool(self._made)

    def ends_by_hand(self) -> None:
        """A step without an optimizer has ended."""
        self.number += 1
        self.ended += 1
        self._on_end(self.number)

    def end_script(self) -> NoReturn:
        """End the script.

        Raises:
            RehearsalDone: Always.
        """
        self._times_ended += 1
        if self._times_ended > PATIENCE:
            self._on_ignored()
        raise RehearsalDone

    def want(self, number: int) -> None:
        """Let another number of steps be enough."""
        self.wanted, self._done = number, False

    @property
    def done(self) -> bool:
        """Whether enough was seen: each living optimizer has made the steps, or one has made many more."""
        if not self._done and self.number >= self.wanted:
            waiting = any(self._counts.get(optimizer, 0) < self.wanted for optimizer in self._made)
            self._done = not waiting or self.number >= PATIENCE * self.wanted
        return self._done


def _is_part(optimizer: Optimizer) -> bool:
    """Whether a library takes a step of its own by several of an optimizer: one for each group or part of a group."""
    return getattr(optimizer, "dryfit_is_part", False)


def _within_its_own_step(optimizer: Optimizer) -> bool:
    """Return whether a subclass's step has called its parent's: torch announces both."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code.co_name == "wrapper")
    own = (frame for frame in frames if frame.f_code.co_filename == optimizers.__file__)
    return sum(frame.f_locals.get("self") is optimizer for frame in own) > 1


# Watch a script's data loaders: which feed training and which evaluation, where an epoch ends early, what comes
# first.
#
# The largest batch comes first, and once more when the optimizer has its state, in place of another one. After enough
# optimizer steps a loader that fed training ends its epoch, as if its data had ended there, so that the script goes
# on to its evaluation and saving. Asked for another epoch after an evaluation, it feeds one more step, and ends the
# script. An evaluation ends after some batches. Host memory is not pinned: there is no driver to do it.
#
# A loader feeds training when an optimizer takes a step on the batch that it gave last. It feeds an evaluation when
# the modules that are called between two of its batches are in evaluation mode, or gradients are off.


EVALUATION_BATCHES = 4
"""Batches after which an evaluation is ended; two, where each makes more events than :data:`LONG_BATCH`."""
LONG_BATCH = 100_000
"""Allocations and frees of a batch whose evaluation loops over what it predicts."""
EPOCHS_WITH_WORKERS = 2
"""Epochs after which a loader makes its batches without new processes: a step of many short ones begins as many."""

WORKERS = 2
"""Processes that make a loader's batches: each makes batches in advance, and the script soon ends."""

_ADAPTERS = ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader")
"""Accelerate's loaders: they look like a ``DataLoader`` and are none."""


class Stock(NamedTuple):
    """What is allocated on the device, and how many events led to it.

    Attributes:
        held_since: Gives size and label of what was allocated since an event and is still there.
        label_since: Gives the allocations since an event other labels.
        repeat_growing: Given the events at the beginning of two alike pieces of the run and at the end of the second,
            allocates and frees as so many more pieces would.
    """

    allocated_bytes: int = 0
    event: int = 0
    held_since: Callable[[int], Sequence[tuple[int, int]]] = lambda _: ()
    label_since: Callable[[int, Sequence[int]], None] = lambda _event, _labels: None
    repeat_growing: Callable[[Sequence[int], int], None] = lambda _marks, _times: None


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


class LoaderPace(NamedTuple):
    """What a loader gives the optimizer step that began last.

    Attributes:
        epoch_steps: Steps in which it is read once; None: it has no length.
        batch_share: Elements of its mean batch, where those of the step's are 1; None: not known.
        batches_per_s: Batches that it makes in one process; None: not measured.
        workers: Processes that the script asks for.
    """

    epoch_steps: int | None
    batch_share: float | None
    batches_per_s: float | None
    workers: int


class LoaderWatch:
    """What is known of a script's data loaders.

    Attributes:
        notes: What was left out, in words.
        largest: The largest batch of the loader that feeds training.
        kept: What the evaluation that was cut and keeps most keeps of each batch; None: none keeps anything.
        pace: What the loader that feeds training gives each step; None: none does.
    """

    def __init__(
        self, steps: OptimizerSteps, *, worst_batch: bool, stock: Callable[[], Stock], modes: TrainingModes
    ) -> None:
        self._modes = modes
        self.notes: dict[str, None] = {}
        self.largest: LargestBatch | None = None
        self._steps = steps
        self._worst_batch = worst_batch
        self._stock = stock
        self.kept: KeptOfBatch | None = None
        self.pace: LoaderPace | None = None
        self._found: WeakKeyDictionary[DataLoader[Any], Found | str] = WeakKeyDictionary()
        self._epochs: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()
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
        elif self._last is not None and (self._last.made_graph or not self._last.evaluates):
            self._modes.in_evaluation_mode |= self._last.evaluates
            self._last.trains = True
            self._training.add(self._last.loader)
            for loader in self._last.sources:
                self._learned(loader)
            self._pace_of(self._last)

    def _pace_of(self, watched: "_Watched") -> None:
        """Learn what an iterator gave for the step that begins."""
        sizes, watched.sizes = watched.sizes, []
        if not sizes:  # another optimizer's step on the same batches
            return
        loaders = [loader for loader in watched.sources if isinstance(loader, DataLoader)]
        found = next((one for one in map(self._found.get, loaders) if isinstance(one, Found)), None)
        length, given = _length(watched.loader), sum(sizes) / len(sizes)
        self.pace = LoaderPace(
            epoch_steps=None if length is None else ceil(length / len(sizes)),
            batch_share=found.mean_size / given if found is not None and given else None,
            batches_per_s=found.batches_per_s if found is not None else None,
            workers=max((loader.num_workers for loader in loaders), default=0),
        )

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
        several = watched.evaluated >= (2 if watched.stock.event - watched.since > LONG_BATCH else EVALUATION_BATCHES)
        if several and watched.evaluated != _length(watched.loader) and self._is_evaluation(watched):
            self.notes[_shortened(watched.loader, watched.evaluated, watched.kept_bytes)] = None
            self._keep(watched)
            watched.ends_here()
            raise StopIteration
        self._drawing.sources = {watched.loader}
        with self._drawing.nested():
            batch = watched.next_batch()
        watched.sources = self._drawing.sources
        size = _size(batch, dict(_named_tensors(batch)))
        watched.sizes.append(size[0] or size[1])
        self._last, self._winding_down_from = watched, None
        return batch

    def _keep(self, watched: "_Watched") -> None:
        if watched.kept_bytes > (self.kept.bytes if self.kept is not None else 0):
            length = _length(watched.loader)
            others = None if length is None else length - watched.evaluated
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
        self._steps.want(self._steps.number + 1)
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

        makes_batches = cls is DataLoader
        serves = self._serving(original) if makes_batches else original

        @wraps(original)
        def iterate(loader: Any) -> Iterator[Any]:
            again = self._steps.done and loader in self._training and torch.is_grad_enabled()
            if again and not self._drawing.depth:
                self._go_past_evaluation()
            loader.pin_memory = False
            found = self._look(loader) if makes_batches else None
            with self._drawing.nested():
                inner = serves(loader)
            return _Watched(self, loader, inner, found, makes_batches=makes_batches)

        cls.__iter__ = iterate

    def _serving(self, begin: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        """Return what begins an epoch: with few workers, and after some epochs without, which may import the script."""

        def again(loader: Any) -> Iterator[Any]:
            self._epochs[loader] = -sys.maxsize  # it needs its workers in all epochs
            return serves(loader)

        def serves(loader: Any) -> Iterator[Any]:
            epochs = self._epochs[loader] = self._epochs.get(loader, 0) + 1
            asked = loader.num_workers, loader.prefetch_factor
            if not loader.num_workers:
                return begin(loader)
            if not isinstance(loader.dataset, IterableDataset):  # its rows depend on the number of workers
                loader.num_workers = min(loader.num_workers, WORKERS)
            loader.prefetch_factor = loader.prefetch_factor and 1  # 0 and None are the script's errors
            try:
                if epochs <= EPOCHS_WITH_WORKERS or loader.timeout or loader.persistent_workers:
                    return begin(loader)
                loader.num_workers, loader.prefetch_factor = 0, None
                return _WithoutWorkers(begin(loader), lambda: again(loader))
            finally:
                loader.num_workers, loader.prefetch_factor = asked

        return serves

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
        trains = torch.is_grad_enabled() and self._modes.is_training(module)
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


class _WithoutWorkers:
    """An epoch whose batches this process makes; from one that fails on workers do: a data set may need them."""

    def __init__(self, inner: Iterator[Any], again: Callable[[], Iterator[Any]]) -> None:
        self._inner = inner
        self._again: Callable[[], Iterator[Any]] | None = again
        self._drawn = 0

    def __iter__(self) -> "_WithoutWorkers":
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._inner)
        except StopIteration:
            raise
        except Exception:
            again, self._again = self._again, None
            if again is None:
                raise
            self._inner = again()
            for _ in range(self._drawn):
                next(self._inner)
            batch = next(self._inner)
        self._drawn += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Watched:
    """A loader's iterator.

    Attributes:
        trains: Whether an optimizer took a step on a batch of it.
        evaluated: Batches that were evaluated.
        kept_bytes: Of the device's memory, that each batch evaluated left allocated.
        stock: What was there when it was last looked at; since: the number of events the time before.
        sources: The loaders that its last batch came through.
        sizes: Elements of each batch that was drawn since the last step.
        made_graph: Whether a module was called on its last batch for a backward pass.
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
        self.sizes: list[int] = []
        self._watch = watch
        self._inner = inner
        self._first = None if found is None else (found.batch,)
        self._left_out = -1 if found is None else found.position
        self._drawn = 0
        self._ended = False
        self._trained_on = self._evaluated_on = self.made_graph = False

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
        self.made_graph |= torch.is_grad_enabled()

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
        self._trained_on = self._evaluated_on = self.made_graph = False

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


def _shortened(loader: Any, after: int, kept_bytes: int) -> str:
    length = _length(loader)
    cut = f"an evaluation was ended after {after}{f' of {length}' if length else ''} batches"
    if kept_bytes <= 0:
        return cut
    others = (length or 0) - after
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
