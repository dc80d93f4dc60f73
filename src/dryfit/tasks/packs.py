"""Several examples in one sequence: which ones, as a pure function of (lengths, capacity, seed, epoch).

How many sequences an epoch has, and how long each is, depends on the lengths alone: an epoch decides which of the
examples of one length goes to which of the places for that length. So every epoch has the same number of steps.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

import torch

from dryfit.core.errors import InternalError
from dryfit.core.seeds import derive_seed


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Lengths of the examples of each sequence: best fit, decreasing.

    It needs at most 11/9 of the fewest sequences possible, and one more (Johnson et al. 1974, SIAM J. Comput. 3(4)).

    Args:
        lengths: Of all examples, each from 1 to ``capacity``.
        capacity: Most tokens of a sequence.
    """
    if lengths and not 1 <= min(lengths) <= max(lengths) <= capacity:
        raise InternalError("packing examples", f"lengths from {min(lengths)} to {max(lengths)}, capacity {capacity}")
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # keys of `with_room` that have a sequence, in order
    for length in sorted(lengths, reverse=True):
        index = bisect_left(rooms, length)
        if index == len(rooms):
            pack, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[index]
            pack = with_room[room].pop()
            if not with_room[room]:
                rooms.pop(index)
        packs[pack].append(length)
        left = room - length
        if not with_room[left]:
            insort(rooms, left)
        with_room[left].append(pack)
    return packs


def epoch_packs(lengths: torch.Tensor, capacity: int, *, seed: int, epoch: int) -> list[list[int]]:
    """The sequences of one epoch, in random order; each example is in exactly one.

    Args:
        lengths: Tokens of each example, 1-dimensional.
        capacity: Most tokens of a sequence.
        seed: Of the trial's batch order.
        epoch: From 0.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "packs", epoch))
    waiting: dict[int, list[int]] = defaultdict(list)
    for example in torch.randperm(len(lengths), generator=generator).tolist():
        waiting[int(lengths[example])].append(example)
    packs = [[waiting[length].pop() for length in pack] for pack in pack_lengths(lengths.tolist(), capacity)]
    order = torch.randperm(len(packs), generator=generator).tolist()
    mixed: list[list[int]] = []
    for index in order:
        pack = packs[index]
        mixed.append([pack[place] for place in torch.randperm(len(pack), generator=generator).tolist()])
    return mixed
