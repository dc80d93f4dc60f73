"""Find the text and class columns of a table by their names and content."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dryfit.core.errors import ConfigError, DataError
from dryfit.core.text.words import brief, did_you_mean, few
from dryfit.starter.columns import Column

MOST_CLASSES: Final = 100
"""More different values are taken for free text or ids; ``data.labels`` may have more."""
_LONGEST_CLASS: Final = 60
_FEWEST_WORDS: Final = 2.0
"""Of a text, in the mean: ids and codes have one."""
_SHORTEST_WORD: Final = 3
"""Letters of a criterion that is a single word: a code has fewer, or a digit."""
_CLEARLY: Final = 2.0
"""A text is told from others without a known name where it is so many times as long."""
ROLES: Final = ("text", "label", "criterion", "group")
"""What a user may say the column of."""

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "label": (
        *("label", "labels", "answer", "class", "category", "target", "sentiment", "intent", "gold", "y", "stars"),
        *("score", "rating", "similarity"),
    ),
    "text": (
        *("text", "passage", "context", "body", "content", "sentence", "premise", "document", "review", "post"),
        *("message", "comment", "tweet", "abstract", "paragraph", "utterance", "description", "sentence1"),
    ),
    "criterion": ("criterion", "question", "hypothesis", "query", "claim", "symptom", "sentence2"),
    "group": (
        *("group", "author", "author_id", "user", "user_id", "document_id", "doc_id", "patient", "patient_id"),
        *("subject", "subject_id", "speaker", "conversation_id", "thread_id", "post_id", "source_id"),
    ),
    "id": ("id", "row_id", "uid", "guid", "example_id", "index", "idx", "pairid"),
}
"""Names that columns of such a kind usually have, the likeliest first."""


class AmbiguousError(ConfigError):
    """Several columns may be meant, or none is clearly.

    Attributes:
        role: What the column is to be.
        candidates: The columns that it may be.
    """

    def __init__(self, doing: str, role: str, candidates: tuple[str, ...]) -> None:
        self.role, self.candidates = role, candidates
        found = "several columns may be" if len(candidates) > 1 else "no column is clearly"
        hint = f"--{role} {candidates[0]}" if candidates else f"--{role} COLUMN"
        super().__init__(doing, f"{found} the {role}", few(map(repr, candidates), most=20) or "a column of it", hint)


@dataclass(frozen=True, slots=True)
class Roles:
    """The columns of a study.

    Attributes:
        text: The text.
        label: The class, or the number; None: there is none, and rows have evidence.
        criterion: What the text is held against; None: there is none.
        group: What may not cross splits; None: each row is alone.
        id: The row's own id; None: it has none.
        evidence: Spans of characters; None: there are none.
    """

    text: str
    label: str | None
    criterion: str | None
    group: str | None
    id: str | None
    evidence: str | None

    def unread(self, columns: Mapping[str, Column]) -> list[str]:
        """Return the columns that have no role."""
        read = (self.text, self.label, self.criterion, self.group, self.id, self.evidence)
        return [name for name in columns if name not in read]


def find_roles(
    columns: Mapping[str, Column],
    given: Mapping[str, str],
    source: str,
    *,
    needs: frozenset[str] = frozenset({"label"}),
) -> Roles:
    """Return the role of each column.

    Args:
        columns: What they hold.
        given: Columns that the user named, by role.
        source: For messages.
        needs: What the task cannot do without: ``label``, ``evidence``, ``criterion``; with ``number`` a label may be
            one.

    Raises:
        ConfigError: There is no such column, or it was named twice.
        AmbiguousError: Several columns may be the one, or none is.
        DataError: A column that was named, or found, cannot be what it is to be, or there is no evidence.
    """
    may_be_numbers = "number" in needs
    doing = f"looking at the columns of {source}"
    _check_given(columns, given, doing)
    free = {name: column for name, column in columns.items() if name not in given.values()}
    evidence = _named(free, ("evidence",))
    evidence = evidence if evidence is not None and free[evidence].lists == free[evidence].rows else None
    if evidence is None and "evidence" in needs:
        raise DataError(doing, _said_of_no_evidence(columns.get("evidence")), "[[start, end], ...] in each row")
    free = _without(free, evidence)
    label = given.get("label")
    if label is None and "label" in needs:
        label = _label(free, doing, may_be_numbers=may_be_numbers)
    free = _without(free, label)
    text = given.get("text")
    criterion, named = given.get("criterion"), _named(_criteria(free), _NAMES["criterion"])
    if text is None:
        # A column `question` is the text where it is the only one.
        text = _text(_without(free, named) if _texts(_without(free, named)) else free, doing)
    free = _without(free, text)
    if criterion is None:
        criterion = _named(_criteria(free), _NAMES["criterion"])
    if criterion is None and "criterion" in needs:
        raise AmbiguousError(doing, "criterion", tuple(free))
    free = _without(free, criterion)
    row_id = next((name for name in _all_named(free, _NAMES["id"]) if _tells_rows(free[name])), None)
    group = given.get("group") or _group(_without(free, row_id), doing)
    _check_text(columns[text], "text", doing)
    if criterion is not None:
        _check_text(columns[criterion], "criterion", doing)
    if group is not None and columns[group].empty:
        raise DataError(doing, _emptiness(columns[group]), "a group for each row", "another --group, or fill them in")
    if label is not None:
        check_label(columns[label], doing, may_be_numbers=may_be_numbers)
    return Roles(text, label, criterion, group, row_id, evidence)


def check_label(column: Column, doing: str, *, may_be_numbers: bool = False) -> None:
    """Refuse a column that holds no classes, and no numbers where these may be labels.

    Raises:
        DataError: It lacks values, has one alone, or so many that it holds numbers, ids or free text.
    """
    name, values, rows = column.name, column.values, column.rows - column.empty
    if column.empty:
        raise DataError(doing, _emptiness(column), "a label for each row", "leave these rows out, or another --label")
    if column.is_numeric and may_be_numbers:
        _check_numbers(column, doing)
        return
    if column.numbers:
        number = next(one for one in values if not one.lstrip("+-").isdigit())
        found = f"column {name!r} holds numbers such as {number}: that looks like regression"
        raise DataError(doing, found, "classes: whole numbers, or names", "another --label, or classes made of it")
    if column.others:
        raise DataError(doing, f"column {name!r} holds objects", "classes: whole numbers, or names", "another --label")
    if column.lists and column.lists < column.rows:
        raise DataError(doing, f"column {name!r} has lists in some rows only", "a list of classes in each row, or none")
    if len(values) < 2 and not column.lists:
        only = next(iter(values))
        raise DataError(doing, f"column {name!r} is {only!r} in every row", "two classes at least", "another --label")
    longest = max(values, key=len)
    if column.is_unique and rows > 2 and not column.lists:
        found = f"column {name!r} has another value in each of {rows} rows, such as {brief(longest, 40)}"
        raise DataError(doing, f"{found}: ids, or free text", "classes, which several rows share", "another --label")
    if len(values) > MOST_CLASSES:
        count = "more than 1000" if column.has_many else str(len(values))
        found = f"column {name!r} has {count} different values: that looks like numbers or free text"
        hint = "another --label; many classes can be written into a study file by hand, and regression: num_labels = 1"
        raise DataError(doing, found, f"at most {MOST_CLASSES} classes", hint)
    if name.strip() in values:
        found = f"column {name!r} is called as one of its values: the first line looks like a row"
        raise DataError(doing, found, "a first line with the names of the columns", "add it")


def _check_numbers(column: Column, doing: str) -> None:
    """Refuse numbers that are all the same, or two whole ones: classes that were written with a point."""
    values = sorted({float(value) for value in column.values})
    if len(values) < 2:
        found = f"column {column.name!r} is {values[0]:g} in every row"
        raise DataError(doing, found, "two different numbers at least", "another --label")
    if len(values) == 2 and all(value.is_integer() for value in values):
        found = f"column {column.name!r} holds {values[0]} and {values[1]}: classes, written with a point"
        raise DataError(doing, found, "classes as whole numbers, or names", f"write {values[0]:g} and {values[1]:g}")


def _check_given(columns: Mapping[str, Column], given: Mapping[str, str], doing: str) -> None:
    roles: dict[str, str] = {}
    for role, name in given.items():
        if name not in columns:
            hint = did_you_mean(name, columns, written=f"--{role} {{}}")
            raise ConfigError(doing, f"there is no column {name!r}", f"its columns: {few(columns, most=20)}", hint)
        if name in roles:
            found = f"column {name!r} is given as --{roles[name]} and --{role}"
            raise ConfigError(doing, found, "a column of its own for each")
        roles[name] = role


def _label(columns: Mapping[str, Column], doing: str, *, may_be_numbers: bool) -> str:
    numeric = [name for name, column in columns.items() if may_be_numbers and column.is_numeric and not column.empty]
    named = list(_all_named(columns, _NAMES["label"]))
    if named:
        shaped = [name for name in named if name in numeric or _looks_like_classes(columns[name])]
        return (shaped or named)[0]  # what is wrong with it is said by its name
    others = {name for role in ("id", "group") for name in _all_named(columns, _NAMES[role])}
    shaped = [name for name, column in columns.items() if name not in others and _looks_like_classes(column)]
    shaped = shaped or [name for name in numeric if name not in others]
    if len(shaped) != 1:
        raise AmbiguousError(doing, "label", tuple(shaped or columns))
    return shaped[0]


def _looks_like_classes(column: Column) -> bool:
    """Whether a column has a few short values, each in several rows."""
    fits = not column.numbers and not column.others and not column.empty and not column.is_unique
    return fits and 2 <= len(column.values) <= MOST_CLASSES and max(map(len, column.values)) <= _LONGEST_CLASS


def _texts(columns: Mapping[str, Column]) -> dict[str, Column]:
    return {name: one for name, one in columns.items() if one.is_text and one.mean_words >= _FEWEST_WORDS}


def _criteria(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns that may hold criteria: texts, or single words that are no codes."""
    words = {name: one for name, one in columns.items() if one.is_text and all(map(_is_worded, one.values))}
    return {**_texts(columns), **words}


def _is_worded(value: str) -> bool:
    return len(value) >= _SHORTEST_WORD and not any(map(str.isdigit, value))


def _text(columns: Mapping[str, Column], doing: str) -> str:
    texts = _texts(columns)
    named = _named(texts, _NAMES["text"]) or _named(
        {name: column for name, column in columns.items() if column.is_text}, _NAMES["text"]
    )
    if named is not None:
        return named
    longest = sorted(texts, key=lambda name: -texts[name].chars)
    if not longest or (len(longest) > 1 and texts[longest[0]].chars < _CLEARLY * texts[longest[1]].chars):
        raise AmbiguousError(doing, "text", tuple(longest or columns))
    return longest[0]


def _group(columns: Mapping[str, Column], doing: str) -> str | None:
    """Return the column of groups, if one has the name of such and values that rows share."""
    named = [name for name in _all_named(columns, (*_NAMES["group"], *_NAMES["id"])) if _groups_rows(columns[name])]
    if len(named) > 1 and named[0].lower() != "group":
        raise AmbiguousError(doing, "group", tuple(named))
    return named[0] if named else None


def _groups_rows(column: Column) -> bool:
    plain = not (column.numbers or column.lists or column.others or column.empty)
    return plain and not column.is_unique and column.different > 1


def _tells_rows(column: Column) -> bool:
    return column.is_unique and not (column.empty or column.numbers or column.lists or column.others)


def _check_text(column: Column, role: str, doing: str) -> None:
    if column.empty:
        raise DataError(
            doing, _emptiness(column), f"a {role} for each row", f"leave these rows out, or another --{role}"
        )
    if not column.is_text:
        example = brief(next(iter(column.values), ""), 40)
        raise DataError(doing, f"column {column.name!r} holds no text, but {example}", "texts", f"another --{role}")


def _said_of_no_evidence(column: Column | None) -> str:
    if column is None:
        return "no column `evidence` with spans"
    empty = f"; the first that is empty in {column.first_empty}" if column.first_empty else ""
    return f"column 'evidence' holds a list in {column.lists} of {column.rows} rows{empty}"


def _emptiness(column: Column) -> str:
    rows = f"{column.empty} of {column.rows} rows"
    return f"column {column.name!r} is empty in {rows}, first in {column.first_empty}"


def _all_named(columns: Mapping[str, Column], names: tuple[str, ...]) -> Iterator[str]:
    """Yield the columns that have one of some names, in the order of these; capitals do not count."""
    for wanted in names:
        yield from (name for name in columns if name.strip().lower() == wanted)


def _named(columns: Mapping[str, Column], names: tuple[str, ...]) -> str | None:
    return next(_all_named(columns, names), None)


def _without(columns: Mapping[str, Column], name: str | None) -> dict[str, Column]:
    return {other: column for other, column in columns.items() if other != name}
