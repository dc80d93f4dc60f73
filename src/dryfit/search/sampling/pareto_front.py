"""Pareto fronts and crowding distances of trials with several goals; in numpy, as each suggestion needs them.

Losses have a row for each trial and a column for each goal; smaller is better in each column, and none is NaN.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


def non_dominated(losses: Floats) -> Indices:
    """Return the indices of the rows that no other row dominates (the Pareto front), in order; equal rows all belong.

    In lexicographic order the first row is dominated by none: one pass over the rest for each row of the front.
    With two columns one pass is enough: a row is dominated where a different one before it has no larger second value.
    """
    if losses.shape[1] == 2:
        return _non_dominated_pairs(losses)
    front: list[Indices] = []
    left = np.lexsort(losses.T[::-1])
    while left.size:
        first, rest = losses[left[0]], losses[left]
        not_better = (rest >= first).all(axis=1)
        front.append(left[(rest == first).all(axis=1)])
        left = left[~not_better]
    return np.sort(np.concatenate(front)) if front else left


def _non_dominated_pairs(losses: Floats) -> Indices:
    order = np.lexsort(losses.T[::-1])
    rows = losses[order]
    differs = np.ones(len(rows), dtype=bool)
    differs[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    second = rows[differs, 1]
    stays = np.ones(len(second), dtype=bool)
    stays[1:] = second[1:] < np.minimum.accumulate(second)[:-1]
    return np.sort(order[stays[np.cumsum(differs) - 1]])


def crowding_distances(losses: Floats) -> Floats:
    """Return each row's crowding distance: the sum over the goals of the gap between its two neighbours.

    The ends of each goal are infinitely far. Of equal rows only the first has a distance: a copy would take the place
    of another end. Source: Deb et al., "A fast and elitist multiobjective genetic algorithm: NSGA-II", 2002.
    """
    distances = np.zeros(len(losses))
    _, firsts = np.unique(losses, axis=0, return_index=True)
    firsts.sort()
    for column in losses[firsts].T:
        order = np.argsort(column, kind="stable")
        sorted_values = column[order]
        distances[firsts[order[[0, -1]]]] = np.inf
        width = sorted_values[-1] - sorted_values[0]
        if width > 0:
            distances[firsts[order[1:-1]]] += (sorted_values[2:] - sorted_values[:-2]) / width
    return distances


def best_spread(losses: Floats, count: int) -> Indices:
    """Return the indices of the ``count`` best rows, in order: front after front, the last one by crowding distance.

    Of rows with equal distances the earlier is taken.
    """
    left = np.arange(len(losses))
    chosen: list[Indices] = []
    wanted = count
    while left.size and wanted > 0:
        at = non_dominated(losses[left])
        best = left[at]
        if best.size > wanted:
            sparsest_first = np.argsort(-crowding_distances(losses[best]), kind="stable")
            best = best[sparsest_first[:wanted]]
        chosen.append(best)
        wanted -= best.size
        left = np.delete(left, at)
    return np.sort(np.concatenate(chosen)) if chosen else left[:0]
