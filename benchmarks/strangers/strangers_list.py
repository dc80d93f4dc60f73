"""The list of strangers' scripts: its rows, what an estimate by hand comes to, and what counts as an answer.

Pure: nothing is read, run or written here.
"""

import ast
import hashlib
import json
import operator
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

PARTS: Final = ("weights", "gradients", "optimizer", "activation")
"""What is estimated of each row, in bytes: the largest activation, and all of the others."""

STATES: Final = ("weights", "optimizer")
"""Parts that are counted at the peak as by hand, as a rule: gradients may not be there yet, or no longer."""

WITHIN: Final = {False: 0.02, True: 0.05}
"""By what share of the estimate a counted part may differ, without and with quantised weights."""

ROUNDING: Final = 2**20 // 10
"""Bytes by which it may differ besides: blocks of the allocator, buffers of a small model; the table shows no less."""

CLOSE: Final = 0.1
"""An answer between two bounds is one where they differ by this share of the larger at most."""

LIMIT_CPU_S: Final = 180
"""An answer that took more CPU seconds, of all its processes, is none."""

_OF_ESTIMATE: Final = frozenset({"by_hand", "apart", "quantised"})
_OPERATORS: Final = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One script of the list.

    Attributes:
        repository: ``owner/name``; its checkout is the folder ``name``.
        commit: What the command, its inputs and the estimate were written for.
        command: The script's own, as its repository says; ``{W}`` is the working folder.
        folder: Where it runs, within the checkout.
        device: Of ``dryfit rehearse``.
        options: Other options of it.
        packages: Modules that must be importable, or requirements with versions.
        versions: Requirements that the script needs in other versions than those here: in an environment of its own.
        variables: Of its environment, ``NAME=VALUE``, that the repository says must be set.
        path: Folders within the checkout that are on ``PYTHONPATH``, as after ``pip install -e``.
        makes: Makers of inputs with their arguments, one a text: functions of ``stranger_inputs``.
        by_hand: Arithmetic of :data:`PARTS`, in bytes; other names may stand before them.
        apart: Of parts of :data:`STATES`, why what is counted at the peak is rightly something else.
        quantised: Whether some weights are; what they take besides their numbers is not counted by hand.
    """

    name: str
    repository: str
    commit: str
    command: str
    device: str
    folder: str = "."
    options: str = ""
    packages: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    by_hand: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    quantised: bool = False

    @property
    def checkout(self) -> str:
        """The folder of the repository's checkout."""
        return self.repository.partition("/")[2]

    @property
    def key(self) -> str:
        """What changes with whatever decides how the row runs: not with the estimate."""
        words = {
            name: value
            for name, value in asdict(self).items()
            if name not in _OF_ESTIMATE and (value or name not in ("versions", "variables"))
        }
        return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:12]

    def words(self, working: str) -> list[str]:
        """Return the command, word by word."""
        return shlex.split(self.command.replace("{W}", working))


def rows_of(table: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return the rows of a parsed list.

    Raises:
        ValueError: A row is not well-formed, with its name and why.
    """
    rows: list[Row] = []
    for entry in table["row"]:
        name = entry.get("name", "a row without a name")
        try:
            tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
            row = Row(**tuples, commit=table["commits"][entry["repository"]])
            estimate(row.by_hand)
            row.words("")
            if row.apart.keys() - set(STATES):
                raise ValueError(f"apart is of {', '.join(STATES)}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error!r}") from error
        rows.append(row)
    names = [row.name for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"rows of the same name: {', '.join(twice)}")
    return tuple(rows)


def estimate(by_hand: Mapping[str, str]) -> dict[str, int]:
    """Return the bytes of each of :data:`PARTS` that arithmetic gives.

    Raises:
        ValueError: It is no arithmetic, a name is unknown, or a part is missing.
    """
    known: dict[str, float] = {}
    for name, text in by_hand.items():
        known[name] = _value(ast.parse(text, mode="eval").body, known)
    missing = [part for part in PARTS if part not in known]
    if missing:
        raise ValueError(f"no estimate of {', '.join(missing)}")
    return {part: round(known[part]) for part in PARTS}


def _value(node: ast.expr, known: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, known), _value(right, known))
    raise ValueError(f"no arithmetic of known names: {ast.unparse(node)}")


class Kind(StrEnum):
    """What came of a row."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    BETWEEN = "between"
    NO_ANSWER = "no answer"
    NOT_RUN = "not run"


ANSWERED: Final = frozenset((Kind.FITS, Kind.DOES_NOT_FIT, Kind.BETWEEN))


def kind_of(record: Mapping[str, Any] | None) -> Kind:
    """Return what came of a row: an answer has a peak and its line, after at least one step."""
    if record is None or record.get("not_run"):
        return Kind.NOT_RUN
    answer = record.get("answer") or {}
    if too_slow(record):
        return Kind.NO_ANSWER
    if not answer.get("peak_allocated_bytes") or not answer.get("peak_line") or not answer.get("steps"):
        return Kind.NO_ANSWER
    match answer.get("fits"):
        case True:
            return Kind.FITS
        case False:
            return Kind.DOES_NOT_FIT
    low, high = bounds(answer)
    return Kind.BETWEEN if low and high and high - low <= CLOSE * high else Kind.NO_ANSWER


def counted(answer: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes that are held at the peak as weights, gradients and optimizer state."""
    held = answer.get("by_category") or {}
    return {
        "weights": held.get("weights", 0) + held.get("adapters", 0),
        "gradients": held.get("gradients", 0),
        "optimizer": held.get("optimizer", 0),
    }


def differing(row: Row, record: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the parts of an answered row of which more or less is counted than by hand, with the share of it."""
    if record is None or kind_of(record) not in ANSWERED:
        return {}
    by_hand, found = estimate(row.by_hand), counted(record["answer"])
    apart = {part: found[part] - by_hand[part] for part in STATES}
    return {
        part: difference / by_hand[part] if by_hand[part] else float("inf")
        for part, difference in apart.items()
        if abs(difference) > max(ROUNDING, WITHIN[row.quantised] * by_hand[part])
    }


def too_slow(record: Mapping[str, Any]) -> bool:
    """Whether a row took more CPU seconds than there are; one that was measured by the clock alone did not."""
    return record.get("cpu_seconds", 0) > LIMIT_CPU_S


def bounds(answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the least and the most memory that a device must have, as far as an unknown verdict tells them."""
    least, needed = answer.get("least_bytes"), answer.get("required_bytes")
    return (least or needed), (needed if least and not answer.get("at_least") else None)


def reason(record: Mapping[str, Any]) -> str:
    """Return in one line why a row has no answer."""
    if record.get("not_run"):
        return one_line(record["not_run"])
    if too_slow(record):
        return f"too slow: over {LIMIT_CPU_S} CPU seconds"
    answer = record.get("answer")
    if answer is None:
        last = [line for line in record.get("stderr", "").splitlines() if line.strip()]
        return one_line(record.get("ended", "") or (last[-1] if last else f"exit status {record.get('status')}"))
    reasons = "; ".join(answer.get("reasons") or []) or str(answer.get("ended"))
    error = raised(answer.get("traceback") or "")
    return one_line(f"{reasons}: {error}" if error else reasons)


def raised(traceback: str) -> str:
    """Return the exception of a traceback, or its only line; empty where a script was ended from outside."""
    lines = [line for line in traceback.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return (errors or (lines if len(lines) == 1 else [""]))[-1].strip()


def one_line(text: str, most: int = 200) -> str:
    """Return a text for a cell of a table."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
    return text if len(text) <= most else text[: most - 1] + "…"


def counts(kinds: Sequence[Kind]) -> str:
    """Return how many rows there are of each kind."""
    answered = sum(kind in ANSWERED for kind in kinds)
    run = sum(kind is not Kind.NOT_RUN for kind in kinds)
    parts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in Kind if kind in ANSWERED and kind in kinds)
    share = f" ({100 * answered / run:.0f} %)" if run else ""
    return (
        f"{len(kinds)} rows; {run} were run: {answered} answered{share}"
        + (f" ({parts})" if parts else "")
        + f", {run - answered} not; {len(kinds) - run} not run"
    )
