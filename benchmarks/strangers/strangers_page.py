"""The table of docs/strangers.md: what came of each row of the list. Pure."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from strangers_list import (
    ANSWERED,
    STATES,
    Kind,
    Row,
    bounds,
    counted,
    counts,
    differing,
    estimate,
    kind_of,
    one_line,
    reason,
)

BEGIN: Final = "<!-- table: written by benchmarks/strangers/strangers.py -->\n"
END: Final = "<!-- end of table -->\n"
GIB, MIB = 2**30, 2**20

_HEAD: Final = (
    (
        "| row | script of | device | answer | device needs, GiB | peak of tensors, GiB | line | CPU s (s) "
        "| by hand, MiB: weights / gradients / optimizer | counted at the peak, MiB | by hand: largest activation |"
    ),
    "|---|---|---|---|--:|--:|---|--:|--:|--:|--:|",
)


def render(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]], *, working: str, page: str = "") -> str:
    """Return what stands between the markers.

    Args:
        found: The newest record of each row that has one.
        working: The folder that paths are told without.
        page: Of which rows that were not run now keep their lines.
    """
    lines = {row.name: _line(row, found.get(row.name), working) for row in rows}
    older = {
        name: line
        for line in page.splitlines()
        if (name := line.partition("` |")[0].removeprefix("| `")) in lines
        and kind_of(found.get(name)) is Kind.NOT_RUN
        and (name not in found or _kind(line) is not Kind.NOT_RUN)
    }
    lines |= older
    results = sum(_kind(line) is not Kind.NOT_RUN for line in older.values())
    told = f"{_when(rows, found)} {results} results are older." if results else _when(rows, found)
    return "\n".join(
        [
            f"**{counts([_kind(line) for line in lines.values()])}.** {told}",
            "",
            *_differing(rows, found, older),
            *_HEAD,
            *lines.values(),
            "",
        ]
    )


def _kind(line: str) -> Kind:
    """Return what came of a row, by its line."""
    return Kind(line.split(" | ")[3])


def _when(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> str:
    run = [found[row.name] for row in rows if kind_of(found.get(row.name)) is not Kind.NOT_RUN]
    if not run:
        return "Nothing was run."
    days = sorted({record["when"][:10] for record in run})
    commits = Counter(record["dryfit"] for record in run)
    versions = ", ".join(f"{commit} ({number} rows)" for commit, number in commits.most_common())
    torch = sorted({record["answer"]["torch"] for record in run if record.get("answer")})
    return f"Run {' to '.join(dict.fromkeys((days[0], days[-1])))} by dryfit {versions}, torch {', '.join(torch)}."


def _differing(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]], older: Mapping[str, str]) -> list[str]:
    """Return what is counted otherwise than by hand, with the row's reason where it has one."""
    said: list[str] = []
    for row in rows:
        marked = [part for part in STATES if f"**{part} " in older.get(row.name, "")]
        for part in marked or differing(row, found.get(row.name)):
            said.append(f"`{row.name}` ({part}: {row.apart.get(part, '**no reason is known**')})")
    return [f"Counted otherwise than by hand: {'; '.join(said)}.", ""] if said else []


def _line(row: Row, record: Mapping[str, Any] | None, working: str) -> str:
    kind = kind_of(record)
    place = f"{row.repository}" + (f", `{row.folder}`" if row.folder != "." else "")
    by_hand = estimate(row.by_hand)
    states = " / ".join(_mib(by_hand[part]) for part in ("weights", "gradients", "optimizer"))
    cells = [f"`{row.name}`", place, row.device]
    if record is None:
        cells += [str(kind), "", "", "no result yet", ""]
        return _joined([*cells, states, "", _mib(by_hand["activation"])])
    seconds = _seconds(record)
    if kind not in ANSWERED:
        cells += [str(kind), "", "", _without(reason(record), working), seconds]
        return _joined([*cells, states, "", _mib(by_hand["activation"])])
    answer = record["answer"]
    low, high = bounds(answer)
    needs = f"{low / GIB:.2f} to {high / GIB:.2f}" if kind is Kind.BETWEEN and low and high else _needs(answer)
    held = " / ".join(map(_mib, counted(answer).values()))
    marks = [f"**{part} {share:+.0%}**" for part, share in differing(row, record).items()]
    line = f"`{_without(answer['peak_line'], working)}`"
    cells += [str(kind), needs, f"{answer['peak_allocated_bytes'] / GIB:.2f}", line, seconds]
    return _joined([*cells, states, ", ".join([held, *marks]), _mib(by_hand["activation"])])


def _seconds(record: Mapping[str, Any]) -> str:
    """Return CPU seconds and, in brackets, those of the clock, as far as they were measured."""
    cpu, clock = record.get("cpu_seconds"), record.get("seconds")
    return " ".join(([f"{cpu:.0f}"] if cpu else []) + ([f"({clock:.0f})"] if clock else []))


def _needs(answer: Mapping[str, Any]) -> str:
    needed = (
        max(answer["required_bytes"], answer["capacity_bytes"] + answer["shortfall_bytes"])
        if not answer["fits"]
        else answer["required_bytes"]
    )
    return ("at least " if answer.get("at_least") else "") + f"{needed / GIB:.2f}"


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}" if size < 10 * MIB else f"{size / MIB:,.0f}"


def _without(text: str, working: str) -> str:
    """Return a text whose paths begin at the checkout, the working folder or the package."""
    text = text.replace(f"{working}/checkouts/", "").replace(working, "W")
    return one_line(re.sub(r"[^\s'\"`]*/(?:site-packages|site)/", "", text))


def _joined(cells: Sequence[str]) -> str:
    return re.sub(r"  +", " ", "| " + " | ".join(cells) + " |")


def with_table(page: str, table: str) -> str:
    """Return the page with another table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table + END + after
