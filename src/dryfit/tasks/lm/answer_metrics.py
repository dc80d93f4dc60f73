"""Metrics of generated answers: exact match, the F1 of quoted words, and those of a user's own function."""

import inspect
import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, Final, cast, final

from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import Metric
from dryfit.core.settings.functions import FunctionName
from dryfit.core.settings.tables import LmSettings
from dryfit.core.user_code import imported, source_file, source_hash
from dryfit.scoring.scored_row import TEXT, ScoredRow
from dryfit.tasks.base import Measured
from dryfit.tasks.rows.characters import word_spans
from dryfit.tasks.rows.prompts import PromptPart, parts_of

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
"""Names that ``study.metric`` can have."""

_FURTHER: Final = ("ids", "prompts")
"""Lists that a user's function is given if it has parameters of these names."""

_WANTED: Final = "a function of two lists of texts, the generated answers and the wanted ones, that returns numbers"


@dataclass(frozen=True, slots=True)
class Answered:
    """Generated answers to some prompts, in order.

    Attributes:
        ids: Of the rows, with the part where a row has two prompts.
        prompts: The prompts.
        answers: What was generated, without white space around it.
        wanted: What should have been, likewise.
        quotes: Whether a prompt asks for evidence.
    """

    ids: tuple[str, ...]
    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    wanted: tuple[str, ...]
    quotes: tuple[bool, ...]


def scored_answers(answered: Answered, none: str) -> list[ScoredRow]:
    """Return each prompt with its answer beside the wanted one: whether they are equal, and the F1 of quoted words.

    Args:
        answered: The answers.
        none: The answer where a row has no evidence. Where only one of answer and wanted text is it, the F1 is 0.
    """
    rows: list[ScoredRow] = []
    every = zip(answered.ids, answered.answers, answered.wanted, answered.quotes, strict=True)
    for name, said, wanted, quoted in every:
        values: dict[str, float] = {Metric.EXACT_MATCH: float(said == wanted)}
        if quoted:
            same = float(said == wanted) if none in (said, wanted) else words_f1(said, wanted)
            values[Metric.TOKEN_F1] = same
        rows.append(ScoredRow(name, {TEXT: wanted}, {TEXT: said}, values=values))
    return rows


def measured(lm: LmSettings, examples: Sequence[int], answered: Answered) -> Measured:
    """Return the metrics of generated answers.

    Args:
        lm: The ``[lm]`` table.
        examples: Which of a split's examples were answered.
        answered: The answers.

    Raises:
        ConfigError: The user's own function raises, or returns something else than before.
    """
    scored = scored_answers(answered, lm.no_evidence.strip())
    values = {str(Metric.EXACT_MATCH): mean_of(Metric.EXACT_MATCH, scored)}
    if PromptPart.EVIDENCE in parts_of(lm):
        values[Metric.TOKEN_F1] = mean_of(Metric.TOKEN_F1, scored)
    if lm.metric is not None:
        own = answer_metric(lm.metric).of(answered)
        values |= {name: found.value for name, found in own.items()}
        scored = [
            replace(row, values={**row.values, **{name: found.rows[at] for name, found in own.items() if found.rows}})
            for at, row in enumerate(scored)
        ]
    return Measured(values, dict(zip(examples, scored, strict=True)))


def mean_of(metric: str, rows: Sequence[ScoredRow]) -> float:
    """Return the mean of a metric over the prompts that have it; NaN where none has."""
    found = [row.values[metric] for row in rows if metric in row.values]
    return sum(found) / len(found) if found else math.nan


def words_f1(said: str, wanted: str) -> float:
    """Return the F1 of two texts' words, each counted as often as it is there.

    As SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250), but case, punctuation and articles count, as in the task
    ``evidence``; 1 where neither has a word.
    """
    first, second = _words(said), _words(wanted)
    total = first.total() + second.total()
    return 2 * (first & second).total() / total if total else 1.0


def _words(text: str) -> Counter[str]:
    return Counter(text[start:end] for start, end in word_spans(text).tolist())


@dataclass(frozen=True, slots=True)
class OwnNumber:
    """A number of a user's function.

    Attributes:
        value: Of all answers together.
        rows: Of each answer, whose mean is the value; empty where the function does not say.
    """

    value: float
    rows: tuple[float, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class AnswerMetric:
    """A user's own function of generated answers.

    Attributes:
        name: ``file.py:function`` without the folder.
        function: It is called with lists of answers and wanted texts; with ``ids`` and ``prompts`` by name, if it has
            parameters of these names.
        file: Where it is defined; None: unknown.
        names: Of the numbers that it returned for a small example.
    """

    name: str
    function: Callable[..., object]
    file: Path | None
    names: tuple[str, ...]

    def of(self, answered: Answered) -> dict[str, OwnNumber]:
        """Return its numbers for some answers, by name.

        Raises:
            ConfigError: It raises, or does not return numbers by the names that it gave before.
        """
        found = _called(self.name, self.function, self.file, answered)
        if tuple(found) != self.names:
            raise ConfigError(
                f"measuring answers by {self.name}",
                f"it returned {', '.join(found) or 'nothing'}",
                f"the numbers that it returned for the first answers that it was given: {', '.join(self.names)}",
            )
        return found

    @property
    def source(self) -> str:
        """A hash of the file that defines it."""
        return source_hash(self.file)


_EXAMPLE: Final = Answered(
    ids=("a", "b"), prompts=("?", "?"), answers=("yes", "none"), wanted=("yes", "no"), quotes=(True, True)
)


@cache
def answer_metric(name: str) -> AnswerMetric:
    """Import a user's function and call it once, on two short answers, to learn the names of its numbers.

    Args:
        name: ``package.module:function`` or ``file.py:function``, with the folder that it is imported from before it,
            unless it is installed.

    Raises:
        ConfigError: There is no such function, it raises, or it returns something else than numbers with names that
            are free.
    """
    parsed = FunctionName.parse(name)
    doing = f"importing lm.metric = {parsed.short}"
    try:
        function = imported(parsed, doing)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(doing, _raised(error, None), "a module that can be imported") from error
    if not callable(function):
        raise ConfigError(doing, f"it is a {type(function).__name__}", _WANTED)
    file = source_file(function)
    names = tuple(_called(parsed.short, function, file, _EXAMPLE))
    for one in names:
        if not _NAME.fullmatch(one) or one in list(Metric):
            taken = "is the name of one of dryfit's own metrics" if one in list(Metric) else "is no name of a metric"
            allowed = "names of small letters, digits and _, that no metric of dryfit's has"
            raise ConfigError(
                doing, f"{one!r} {taken}", allowed, "return a dict with other names, or rename the function"
            )
    return AnswerMetric(parsed.short, function, file, names)


def _called(name: str, function: Callable[..., object], file: Path | None, answered: Answered) -> dict[str, OwnNumber]:
    """Call a user's function; a number alone, or a list of them, has the function's own name.

    Raises:
        ConfigError: It cannot be called so, raises, or returns something else than numbers.
    """
    doing = f"measuring answers by {name}"
    further = {key: list(getattr(answered, key)) for key in _FURTHER if key in _parameters(function)}
    try:
        inspect.signature(function).bind([], [], **further)
    except TypeError as error:
        raise ConfigError(doing, f"it takes {inspect.signature(function)}: {error}", _WANTED) from error
    except ValueError:  # a built-in that does not tell
        pass
    try:
        said = function(list(answered.answers), list(answered.wanted), **further)
    except (Exception, SystemExit) as error:
        raise ConfigError(doing, _raised(error, file), _WANTED) from error
    own = name.rpartition(":")[2].rpartition(".")[2]
    values = cast("Mapping[Any, Any]", said) if isinstance(said, Mapping) else {own: said}
    numbers = {key: _number(value, len(answered.ids)) for key, value in values.items()}
    wrong = [key for key, number in numbers.items() if not isinstance(key, str) or number is None]
    if wrong or not numbers:
        where = f"{wrong[0]!r}: {values[wrong[0]]!r:.60}" if wrong else "an empty dict"
        raise ConfigError(
            doing, f"it returned {where}", "a number, a list of one for each answer, or a dict of these by their names"
        )
    return {str(key): number for key, number in numbers.items() if number is not None}


def _number(said: Any, answers: int) -> OwnNumber | None:
    """Return what a function said as a number; of a list, one for each answer, their mean. None: it is neither."""
    plain = said.tolist() if hasattr(said, "tolist") else said  # NumPy's and torch's
    if isinstance(plain, Real):
        return OwnNumber(float(plain))
    if not isinstance(plain, list | tuple) or len(cast("Sequence[Any]", plain)) != answers:
        return None
    rows = cast("Sequence[Any]", plain)
    if not all(isinstance(one, Real) for one in rows):
        return None
    each = tuple(float(one) for one in rows)
    return OwnNumber(sum(each) / answers, each if all(map(math.isfinite, each)) else ())


def _parameters(function: Callable[..., object]) -> Sequence[str]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:
        return ()


def _raised(error: BaseException, file: Path | None) -> str:
    """Return what was raised, and the last line of the function's own file that was on the way."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is not None and Path(frame.filename) == file] or frames
    return f"it raised {type(error).__name__}: {error} ({own[-1].filename}:{own[-1].lineno})"
