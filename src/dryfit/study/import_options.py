"""Options of an import, and which format reads them: an option that would be ignored is an error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, TypedDict

from dryfit.settings.errors import ConfigError
from dryfit.settings.splits import SplitRule

ALL: Final = "all"
FIELDS: Final = ("id", "group", "criterion", "text", "label", "evidence")
NEEDED: Final = ("text", "label")


class Format(StrEnum):
    """The format of a data set."""

    CONTRACTNLI = "contractnli"
    SQUAD = "squad"
    REDSM5 = "redsm5"
    GLUE = "glue"
    HUB = "hub"


class ImportOptions(TypedDict, total=False):
    """Options beside format, sources and target.

    Attributes:
        columns: glue, hub: the column of each field, ``{"text": "sentence", "label": "label"}``.
        labels: glue, hub: names of the classes, from class 0 on; without them labels are integers.
        header: glue: whether the first line names the columns; else they are called 1, 2, ...
        criteria: redsm5: the file that describes each symptom.
        passage_chars: contractnli: the length from which a passage ends with the next span.
        negatives: contractnli, redsm5: rows with label 0 for each with label 1, or ``all``.
        validation: With a folder as target: share of the groups.
        test: With a folder as target: share of the groups.
        split_seed: With a folder as target: seed of the split.
    """

    columns: Mapping[str, str]
    labels: Sequence[str]
    header: bool
    criteria: Path | str
    passage_chars: int
    negatives: int | str
    validation: float
    test: float
    split_seed: int


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """The sources and options of a format.

    Attributes:
        sources: Descriptions of its sources, in order.
        options: Names of the options it reads.
    """

    sources: tuple[str, ...]
    options: frozenset[str] = frozenset()


FACTS: Final[dict[Format, FormatFacts]] = {
    Format.CONTRACTNLI: FormatFacts(("a JSON file",), frozenset({"passage_chars", "negatives"})),
    Format.SQUAD: FormatFacts(("a JSON file",)),
    Format.REDSM5: FormatFacts(
        ("a CSV file of posts", "a CSV file of annotations"), frozenset({"criteria", "negatives"})
    ),
    Format.GLUE: FormatFacts(("a TSV file",), frozenset({"columns", "labels", "header"})),
    Format.HUB: FormatFacts(("NAME[:SPLIT[:CONFIG]]",), frozenset({"columns", "labels"})),
}
_OF_SPLITS: Final = frozenset({"validation", "test", "split_seed"})
DEFAULT_RULE: Final = SplitRule(validation=0.2, test=0.0, seed=0)


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """The columns of a table that hold the fields of a row.

    Attributes:
        columns: Column by field; rows lack the fields that are not in it.
        labels: Names of the classes; empty: labels are integers.
    """

    columns: Mapping[str, str]
    labels: tuple[str, ...] = ()


def check_options(form: Format, sources: Sequence[str], options: ImportOptions, *, into_folder: bool) -> None:
    """Refuse options that the format does not read, and a wrong number of sources.

    Raises:
        ConfigError: There is such an option, or the number of sources is wrong.
    """
    facts = FACTS[form]
    doing = f"importing {form}"
    if len(sources) != len(facts.sources):
        found = f"{len(sources)} given: {', '.join(sources)}" if sources else "none given"
        raise ConfigError(doing, found, " and ".join(facts.sources), "import each file by itself" if sources else "")
    given = frozenset(options)
    unread = sorted(given - facts.options - _OF_SPLITS)
    if unread:
        raise ConfigError(doing, f"it does not read {', '.join(unread)}", ", ".join(sorted(facts.options)) or "none")
    if not into_folder and given & _OF_SPLITS:
        raise ConfigError(
            doing,
            f"{', '.join(sorted(given & _OF_SPLITS))} with a file as target",
            "a folder as target: its files are the splits",
            "leave out the name of the file",
        )


def split_rule(options: ImportOptions) -> SplitRule:
    """Return how rows are split among the files of a folder.

    Raises:
        ConfigError: A share is out of range.
    """
    rule = SplitRule(
        validation=options.get("validation", DEFAULT_RULE.validation),
        test=options.get("test", DEFAULT_RULE.test),
        seed=options.get("split_seed", DEFAULT_RULE.seed),
    )
    for name, share in (("validation", rule.validation), ("test", rule.test)):
        if not 0 <= share < 1:
            raise ConfigError("splitting by group", f"{name} is {share:g}", "a share of the groups, from 0 to below 1")
    return rule


def negatives_of(options: ImportOptions, default: int | None) -> int | None:
    """Return the number of rows with label 0 for each with label 1; None: all there are.

    Raises:
        ConfigError: It is neither ``all`` nor a number from 1.
    """
    if "negatives" not in options:
        return default
    value = options["negatives"]
    if value == ALL:
        return None
    if isinstance(value, str) or value < 1:
        raise ConfigError("choosing rows with label 0", f"negatives is {value!r}", "1, 2, ... or all")
    return value


def column_map(options: ImportOptions) -> ColumnMap:
    """Return the column map of the options.

    Raises:
        ConfigError: A field is unknown, or one that every row needs is not named; or a class is named twice.
    """
    columns = dict(options.get("columns", {}))
    doing = "reading the column map"
    for field in columns:
        if field not in FIELDS:
            raise ConfigError(doing, f"there is no field {field!r}", ", ".join(FIELDS))
    absent = [field for field in NEEDED if field not in columns]
    if absent:
        raise ConfigError(
            doing, f"no column for {' and '.join(absent)}", "text and label", f"--map {absent[0]}=COLUMN, once a field"
        )
    labels = tuple(options.get("labels", ()))
    if len(set(labels)) < len(labels) or "" in labels:
        found = f"a name that is empty or there twice: {', '.join(labels)}"
        raise ConfigError("reading the names of the classes", found, "different names")
    return ColumnMap(columns, labels)
