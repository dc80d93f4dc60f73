"""Find the largest batch of a data loader without the script noticing.

Batches are collated on the CPU, in the sampler's order, from a copy of the sampler; the global random numbers of torch,
numpy and Python are put back. Only map-style data sets, whose rows may be asked for twice, are read. A generator of its
own that a data set keeps is drawn from.
"""

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from dryfit.core.jobs.rehearsal import CHARACTERS, LargestBatch

MOST_BATCHES = 2000
MOST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Found:
    """The largest batch.

    Attributes:
        position: Of the batch in the epoch that is about to begin.
        again: Collates the batch anew: a script may change what it was given.
        note: Why no more were looked at; empty where all were, or the number was reached.
    """

    position: int
    batch: Any
    again: Callable[[], Any]
    answer: LargestBatch
    note: str


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
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def _search(loader: DataLoader[Any], batches: int, most_s: float) -> Found | str:
    began_s = time.monotonic()
    largest: tuple[tuple[int, int, int], int, Any, Any] | None = None
    seen, note = 0, ""
    for indices in islice(_copied(loader), min(batches, MOST_BATCHES)):
        batch = _collate(loader, indices)
        tensors = dict(_named_tensors(batch))
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            return "the largest batch is not known: the data set puts tensors on the device"
        size = (
            sum(tensor.numel() for tensor in tensors.values()),
            prod(_characters(batch)),
            sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        )
        if largest is None or size > largest[0]:
            largest = (size, seen, batch, indices)
        seen += 1
        if time.monotonic() - began_s > most_s and seen < batches:
            note = f"the largest batch is that of {seen} of {batches}: {most_s:g} s were up"
            break
    if largest is None or not any(largest[0]):
        return "the largest batch is not known: the data loader gives neither tensors nor texts"
    _, position, batch, rows = largest
    shapes = {name: tuple(tensor.shape) for name, tensor in _named_tensors(batch)} or {CHARACTERS: _characters(batch)}
    answer = LargestBatch(shapes=shapes, seen=seen, of=batches, fed_first=True)

    def again() -> Any:
        with _random_numbers_kept():
            return _collate(loader, rows)

    return Found(position, batch, again, answer, note)


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
