"""Hold predictions against what others measured: ``make published-compare``.

Reads ``rows.csv``, ``measured.csv`` and predictions that are committed (a prediction comes before a comparison), and
writes the table and the picture of docs/accuracy.md. Another predictor is scored with the same rows by a file of its
own: lines of JSON with ``row`` and ``counters``.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from published_list import FAMILIES, Row, rows_of  # noqa: E402
from published_run import PREDICTIONS, first_records, records  # noqa: E402
from published_score import (  # noqa: E402
    BATCH_TARGETS,
    OVER_PERCENT,
    Error,
    Values,
    anchored,
    apart,
    batches,
    errors,
    picture,
    rows_table,
    summary,
    summary_table,
    verdicts,
)
from published_times import step_errors, times_table  # noqa: E402

FURTHEST = 12
FACTS = ROOT / "src" / "dryfit" / "documents" / "accuracy.json"
OWN_SCRIPTS = [ROOT / "docs" / "measurements" / f"gpu-scripts-h200-{name}.jsonl" for name in ("predicted", "measured")]
TIMES = ("<!-- times: written by benchmarks/published/compare.py -->\n", "<!-- end of the times -->\n")
PAGE, PICTURE = ROOT / "docs" / "accuracy.md", ROOT / "docs" / "published.svg"
BEGIN, END = "<!-- table: written by benchmarks/published/compare.py -->\n", "<!-- end of the table -->\n"


def measured_values(text: str) -> dict[str, dict[str, int]]:
    """Return the measured values of a table ``name,counter,value``."""
    found: dict[str, dict[str, int]] = {}
    for entry in csv.DictReader(text.splitlines()):
        found.setdefault(entry["name"], {})[entry["counter"]] = int(entry["value"])
    return found


def is_committed(path: Path) -> bool:
    """Whether a file is as it was committed, so that no comparison came before it."""
    git = ["git", "-C", str(path.parent)]
    known = subprocess.run([*git, "ls-files", "--error-unmatch", path.name], capture_output=True, check=False)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", path.name], capture_output=True, check=False)
    return known.returncode == 0 and changed.returncode == 0


def by_formula(row: Row) -> int:
    """Return the bytes of weights, gradients and AdamW's state by the count of parameters, adapters in fp32."""
    each = 2 if row.weights == row.trained else 4
    return row.weight_bits * (row.weights - row.trained) // 8 + 4 * each * row.trained


def by_accelerate(row: Row) -> int:
    """Return what ``accelerate estimate-memory`` gives for training with Adam in bf16."""
    from accelerate.commands.estimate import estimate_training_usage

    return max(estimate_training_usage(4 * row.weights, "bfloat16").values())


def baselines(rows: Sequence[Row], found: Sequence[Error]) -> str:
    """Return a table of what simpler estimates come to on the same rows."""
    lines = ["| predictor | counter | rows | median | 95th percentile |", "|---|---|--:|--:|--:|"]
    compared = [error for error in found if error.row.weights and error.counter in ("allocated", "reserved")]
    predictors = {
        "dryfit": lambda error: error.predicted,
        "weights, gradients and optimizer state": lambda error: by_formula(error.row),
        "`accelerate estimate-memory`": lambda error: by_accelerate(error.row),
    }
    for name, predict in predictors.items():
        for counter in ("allocated", "reserved"):
            part = [
                Error(error.row, counter, predict(error), error.measured)
                for error in compared
                if error.counter == counter
            ]
            if of := summary(part):
                lines.append(f"| {name} | {counter} | {of.rows} | {of.median:.1f} % | {of.p95:.1f} % |")
    return "\n".join(lines)


def batch_lines(found: Sequence[Error]) -> list[str]:
    """Return how batches compare, and which differ."""
    part = [error for error in found if error.counter == "batch"]
    if not part:
        return []
    of = batches(part)
    same, false = 100 * of.same / of.rows, 100 * of.false_fits / of.rows
    told = (
        f"timm: of {of.rows} models, the same batch as on the RTX 3090: {of.same} ({same:.0f} %, target "
        f"{BATCH_TARGETS[0]:g} %); a larger one, so a false fit: {of.false_fits} ({false:.0f} %, target "
        f"{BATCH_TARGETS[1]:g} %); a smaller one: {of.smaller}."
    )
    apart = [f"`{e.row.name[5:]}` {e.predicted} for {e.measured}" for e in part if e.predicted != e.measured]
    return [told, "", f"Other batches: {', '.join(apart)}.", ""] if apart else [told, ""]


def verdict_lines(rows: Sequence[Row], predicted: Values, measured: Values) -> list[str]:
    """Return how verdicts compare with what happened, and which are wrong."""
    of = verdicts(rows, predicted, measured)
    if not of.rows:
        return []
    ended, wrong = sum(of.rows.values()), len(of.false_fits) + len(of.false_refusals)
    told = (
        f"Verdicts of LitGPT and nanoVLM, of {ended} runs that ended and {len(of.rows) - ended} that ran out of "
        f"memory: {len(of.rows) - wrong} of {len(of.rows)} right."
    )
    named = (("fits, and ran out of memory", of.false_fits), ("does not fit, and ran", of.false_refusals))
    return [" ".join([told, *(f"Told as «{what}»: {', '.join(names)}." for what, names in named if names)]), ""]


Records = Mapping[str, Mapping[str, Any]]


def found_errors(rows: Sequence[Row], predictions: Records, measured: Mapping[str, Any]) -> list[Error]:
    """Return the errors of predictions."""
    predicted = anchored({name: record.get("counters") or {} for name, record in predictions.items()}, measured, rows)
    return errors(rows, predicted, measured)


def render(rows: Sequence[Row], predictions: Records, firsts: Records, measured: Mapping[str, Any]) -> str:
    """Return what stands between the markers of the page: of each row its newest prediction, and its first."""
    found = found_errors(rows, predictions, measured)
    without = [(row, predictions[row.name]) for row in rows if row.name in predictions]
    without = [(row, record) for row, record in without if not record.get("counters")]
    left = {key: sum(row.family == key and row.name not in predictions for row in rows) for key in FAMILIES}
    over = [error for error in found if error.counter != "batch" and abs(error.percent) > OVER_PERCENT]
    parts = [
        "All rows, the newest prediction of each:",
        "",
        summary_table(found),
        "",
        "The rows that were rehearsed with the versions of torch and transformers that they were measured with:",
        "",
        summary_table([error for error in found if not apart(error.row, predictions[error.row.name])]),
        "",
        "Rows whose value nobody who worked on dryfit had seen, the first prediction of each:",
        "",
        summary_table(found_errors(rows, firsts, measured), seen=False),
        "",
        *batch_lines(found),
        *verdict_lines(rows, {name: record.get("counters") or {} for name, record in predictions.items()}, measured),
        "![Predicted against measured memory](published.svg)",
        "",
        "Simpler estimates on the same rows:",
        "",
        baselines(rows, found),
        "",
        rows_table(found, predictions),
        "",
        f"Errors over {OVER_PERCENT:g} %: "
        + ("; ".join(f"{error.row.name} ({error.counter} {error.percent:+.1f} %)" for error in over) or "none")
        + ".",
        "",
        "Without a prediction: "
        + ("; ".join(f"{row.name}: {r.get('not_run') or r.get('why')}" for row, r in without) or "none")
        + ".",
        "Not run: " + (", ".join(f"{FAMILIES[key].title} {n}" for key, n in left.items() if n) or "none") + ".",
        "",
    ]
    return "\n".join(parts)


def render_times(rows: Sequence[Row], predictions: Records, measured: Mapping[str, Any]) -> str:
    """Return how step times compare: by source, and the rows that are furthest off."""
    found = step_errors(rows, predictions, measured)
    furthest = sorted(found, key=lambda error: -abs(error.percent))[:FURTHEST]
    named = "; ".join(f"{error.row.name} {error.percent:+.0f} %" for error in furthest)
    return f"{times_table(found)}\n\nFurthest off: {named or 'none'}.\n"


def facts(rows: Sequence[Row], firsts: Records, measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a rehearsal says of how right such answers were: by kind of script, the first prediction of each."""
    found = found_errors(rows, firsts, measured)
    peft = _within([error for error in found if error.row.family in ("image-gen", "metamath")])
    told: dict[str, dict[str, Any]] = {"peft": {"what": "PEFT's scripts that others measured", **peft}}
    batch = [error for error in found if error.counter == "batch"]
    if batch:
        of = batches(batch)
        numbers = {"rows": of.rows, "same": of.same, "larger": of.false_fits}
        told["timm"] = {"what": "models of timm that others measured", **numbers}
    own = [{one["name"]: one for one in map(json.loads, file.read_text("utf-8").splitlines())} for file in OWN_SCRIPTS]
    counters = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes"}
    pairs = [
        Error(rows[0], counter, own[0][name][key], own[1][name][key])
        for name in own[0].keys() & own[1].keys()
        for counter, key in counters.items()
        if own[0][name].get(key) and own[1][name].get(key)
    ]
    return told | {"scripts": {"what": "training scripts on an H200", **_within(pairs)}}


def _within(found: Sequence[Error]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for counter, percent in (("allocated", 1), ("reserved", 5)):
        part = [error for error in found if error.counter == counter]
        numbers |= {f"of {counter}": len(part), counter: sum(abs(error.percent) <= percent for error in part)}
    return numbers


def put(page: str, marks: tuple[str, str], text: str) -> str:
    """Return a page with a text between two marks."""
    before, _, rest = page.partition(marks[0])
    return before + marks[0] + text + marks[1] + rest.partition(marks[1])[2]


def main() -> None:
    """Compare, and write the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS)
    parser.add_argument("--print", action="store_true", help="print the table, and write nothing")
    given = parser.parse_args()
    if given.predictions == PREDICTIONS and not is_committed(PREDICTIONS):
        parser.error(f"{PREDICTIONS.name} is not committed as it is: commit predictions before they are compared")
    rows = rows_of((HERE / "rows.csv").read_text("utf-8"))
    measured, predictions = measured_values((HERE / "measured.csv").read_text("utf-8")), records(given.predictions)
    firsts = first_records(given.predictions)
    table = render(rows, predictions, firsts, measured)
    if given.print:
        print(table, render_times(rows, predictions, measured), sep="\n")
        return
    page = put(PAGE.read_text("utf-8"), (BEGIN, END), table)
    PAGE.write_text(put(page, TIMES, render_times(rows, predictions, measured)), "utf-8")
    FACTS.write_text(json.dumps(facts(rows, firsts, measured), indent=1) + "\n", "utf-8")
    PICTURE.write_text(picture(found_errors(rows, predictions, measured)), "utf-8")


if __name__ == "__main__":
    main()
