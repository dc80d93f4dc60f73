"""Assignment of groups to splits and folds, and seeds: both by hashes of names."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dryfit.settings.errors import ConfigError, DataError

# Seeds derived by hashing, independent of the order of calls.


_SEED_BITS = 31


def derive_seed(*parts: object) -> int:
    """Derive a seed in ``[0, 2**31)`` from any sequence of printable parts.

    Equal parts give the same seed on every platform and Python version (SHA-256 of their text); different parts give
    independent seeds.
    """
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


# Assignment of groups to splits and folds by hashes of their names, the same in every process.


TRAIN: Final = "train"
VALIDATION: Final = "validation"
TEST: Final = "test"
SPLITS: Final = (TRAIN, VALIDATION, TEST)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How groups are divided into splits.

    Attributes:
        validation: Share of the groups, from 0 to below 1.
        test: Share of the groups, from 0 to below 1; 0: there is no test split.
        seed: Seed of the order of groups.
    """

    validation: float
    test: float
    seed: int


def split_groups(groups: Iterable[str], rule: SplitRule, *, doing: str, hint: str) -> dict[str, str]:
    """Return the split of each group.

    Groups are ordered by a hash of (seed, group); the first ones go to validation, the next to test. So rows or groups
    that are added later move few others.

    Args:
        groups: Their names; repeated ones count once.
        rule: How to divide them.
        doing: For the error: ``splitting rows.jsonl by author``.
        hint: For the error: what to change.

    Raises:
        DataError: A split would have no group.
    """
    ordered = _in_order(groups, rule.seed)
    wanted = {VALIDATION: rule.validation, TEST: rule.test}
    sizes = {name: max(1, round(part * len(ordered))) if part > 0 else 0 for name, part in wanted.items()}
    if sizes[VALIDATION] == 0 or sum(sizes.values()) >= len(ordered):
        raise DataError(
            doing,
            f"{len(ordered)} groups, of which validation takes {sizes[VALIDATION]} and test {sizes[TEST]}",
            allowed="at least one group for each of train and validation",
            hint=hint,
        )
    last_validation = sizes[VALIDATION]
    last_test = last_validation + sizes[TEST]
    return {
        group: VALIDATION if index < last_validation else TEST if index < last_test else TRAIN
        for index, group in enumerate(ordered)
    }


def fold_groups(groups: Iterable[str], folds: int, *, seed: int, doing: str, hint: str) -> dict[str, int]:
    """Return the fold of each group, from 1.

    Groups are ordered as by :func:`split_groups` and divided into runs whose lengths differ by one at most: no fold is
    empty, and groups that are added later move few others.

    Args:
        groups: Their names; repeated ones count once.
        folds: Number of folds.
        seed: Seed of the order of groups.
        doing: For the error: ``dividing train and validation by group``.
        hint: For the error: what to change.

    Raises:
        ConfigError: There are fewer groups than folds.
    """
    ordered = _in_order(groups, seed)
    if len(ordered) < folds:
        raise ConfigError(
            doing,
            f"{len(ordered)} groups for data.folds = {folds}",
            allowed=f"at most {len(ordered)} folds" if len(ordered) > 1 else "at least two groups",
            hint=hint,
        )
    return {group: index * folds // len(ordered) + 1 for index, group in enumerate(ordered)}


def _in_order(groups: Iterable[str], seed: int) -> list[str]:
    return sorted(set(groups), key=lambda group: (derive_seed(seed, group), group))
