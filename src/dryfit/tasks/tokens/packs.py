"""Packing: which examples share a sequence, as a pure function of (lengths, capacity, seed)."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

import torch

from dryfit.core.errors import InternalError
from dryfit.core.seeds import derive_seed


def pack(lengths: Sequence[int], capacity: int, *, seed: int) -> list[list[int]]:
    """Return the examples of each sequence, by best fit decreasing; the seed decides among equal lengths.

    It needs at most 11/9 of the fewest sequences possible, and one more (Johnson et al. 1974, SIAM J. Comput. 3(4)).

    Args:
        lengths: Tokens of each example, from 1 to ``capacity``.
        capacity: Most tokens of a sequence.
        seed: Of the order among equals, within a sequence and of the sequences.
    """
    if lengths and not 1 <= min(lengths) <= max(lengths) <= capacity:
        raise InternalError("packing examples", f"lengths from {min(lengths)} to {max(lengths)}, capacity {capacity}")
    generator = torch.Generator().manual_seed(derive_seed(seed, "packs"))
    mixed = torch.randperm(len(lengths), generator=generator).tolist()
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # keys of `with_room` with a sequence, ascending
    for example in sorted(mixed, key=lambda one: -lengths[one]):
        index = bisect_left(rooms, lengths[example])
        if index == len(rooms):
            place, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[index]
            place = with_room[room].pop()
            if not with_room[room]:
                rooms.pop(index)
        packs[place].append(example)
        left = room - lengths[example]
        if not with_room[left]:
            insort(rooms, left)
        with_room[left].append(place)
    return [_mixed(packs[index], generator) for index in torch.randperm(len(packs), generator=generator).tolist()]


def _mixed(examples: list[int], generator: torch.Generator) -> list[int]:
    return [examples[index] for index in torch.randperm(len(examples), generator=generator).tolist()]
