"""A command on several devices: a table, JSON, and requests for a device that others read (SkyPilot, Slurm)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final, cast

from dryfit.documents.document import Block, Document, Line, counted, document_of, duration_text, json_of
from dryfit.documents.rehearsals import cost_text, hours_text, place_text, rehearsal_json, step_time_cell
from dryfit.settings.choices import Emitted
from dryfit.settings.device_answers import DeviceAnswer, DeviceAnswers
from dryfit.settings.errors import ConfigError
from dryfit.settings.largest_value import LargestValue, TriedValue, ValueEnd
from dryfit.settings.text import Table, gib
from dryfit.study.step_calibrations import StepCalibrated

_SAID: Final = {True: "yes", False: "no", None: "unknown"}
SKYPILOT: Final = {
    "p100": "P100",
    "v100-16": "V100",
    "v100-32": "V100-32GB",
    "t4": "T4",
    "rtx3060": "RTX3060",
    "rtx3080": "RTX3080",
    "rtx3090": "RTX3090",
    "rtx4090": "RTX4090",
    "rtx5090": "RTX5090",
    "a10": "A10",
    "a10g": "A10G",
    "a40": "A40",
    "a5000": "RTXA5000",
    "a6000": "RTXA6000",
    "rtx6000ada": "RTX6000-Ada",
    "l4": "L4",
    "l40": "L40",
    "l40s": "L40S",
    "a100-40": "A100",
    "a100-80": "A100-80GB",
    "h100-80": "H100",
    "h200": "H200",
    "gh200": "GH200",
    "b200": "B200",
}
"""Names of SkyPilot's catalogues (docs.skypilot.co, GPUs and accelerators; ``sky show-gpus -a``)."""


@json_of.register
def device_answers_json(answers: DeviceAnswers, *, with_timeline: bool = False) -> dict[str, object]:
    """Return the answers as ``rehearse --json`` prints them: each is the object of one device, with three keys more."""
    return {
        "schema": 2,
        "fits": answers.fits,
        "rehearsals": answers.rehearsals,
        "planner_s": answers.rehearsal_s,
        "devices": [
            {
                **cast("dict[str, object]", rehearsal_json(one.answer, with_timeline=with_timeline)),
                "left_over_bytes": one.left_over_bytes,
                "recorded_on": one.recorded_on,
                "apart": one.apart,
            }
            for one in answers.answers
        ],
    }


@document_of.register
def device_answers_document(answers: DeviceAnswers) -> Document:
    """Return the devices on which a command fits, a table of all, and which of them shared a recording."""
    fitting, every = answers.fitting, answers.answers
    style = "green" if answers.fits else "red" if not fitting else "yellow"
    names = f": {', '.join(one.device.name for one in fitting)}" if fitting else ""
    blocks: list[Block] = [
        Line(f"rehearsal fits on {len(fitting)} of {counted(len(every), 'device')}{names}", style),
        "",
        devices_table(answers),
        "",
        *_best(answers),
        *_reasons(answers),
        *_shared(answers),
    ]
    took = f"{counted(answers.rehearsals, 'rehearsal')} in {duration_text(answers.rehearsal_s)}"
    return Document((*blocks, Line(took, "dim")))


def devices_table(answers: DeviceAnswers) -> Table:
    """Return a row for each device."""
    rows = [_row(one) for one in answers.answers]
    heads = ["device", "fits", "required", "of", "left over"]
    runs = [one.answer.run for one in answers.answers]
    further = {
        "a step (80 %)": [step_time_cell(one.answer.work) for one in answers.answers],
        "run, hours": [f"{run.hours.low:.2g} to {run.hours.high:.2g}" if run and run.hours else "" for run in runs],
        "cost": [cost_text(run.cost) if run and run.cost else "" for run in runs],
    }
    columns = {head: cells for head, cells in further.items() if any(cells)}
    rows = [(*row, *cells) for row, *cells in zip(rows, *columns.values(), strict=True)]
    return Table((*heads, *columns), tuple(rows))


def _best(answers: DeviceAnswers) -> list[str]:
    """Return the cheapest and the fastest of the devices on which the command fits."""
    runs = [(one.device.name, one.answer.run) for one in answers.fitting if one.answer.run is not None]
    times = {name: run.hours for name, run in runs if run.hours is not None}
    costs = {name: run.cost for name, run in runs if run.cost is not None}
    lines: list[str] = []
    if len(costs) > 1:
        cheapest = min(costs, key=lambda name: costs[name].estimate)
        lines.append(f"cheapest that fits: {cheapest}, {cost_text(costs[cheapest])}")
    if len(times) > 1:
        fastest = min(times, key=lambda name: times[name].estimate)
        lines.append(f"fastest that fits: {fastest}, {hours_text(times[fastest])}")
    old = [f"{name} ({cost.as_of})" for name, cost in costs.items() if cost.is_old]
    return [*lines, f"prices older than 90 days: {', '.join(old)}"] if old else lines


def _row(one: DeviceAnswer) -> tuple[str, ...]:
    memory, left_bytes = one.answer.memory, one.left_over_bytes
    least = "at least " if one.answer.at_least else ""
    needed = "unknown" if memory is None else f"{least}{gib(memory.required_bytes)}"
    left = "unknown" if left_bytes is None or one.answer.at_least else gib(left_bytes)
    return one.device.name, _SAID[one.fits], needed, gib(one.device.capacity_bytes), left


def _reasons(answers: DeviceAnswers) -> list[str]:
    """Return where memory peaks, or why a verdict is unknown, with the devices of which it is true."""
    told: dict[str, list[str]] = {}
    for one in answers.answers:
        answer, memory = one.answer, one.answer.memory
        if one.fits is None:
            text = f"unknown: {'; '.join(answer.reasons) or 'no reason was given'}"
        elif memory is not None:
            text = f"peak at {place_text(memory.peak_line, memory.peak_code, memory.peak_source)}"
        else:
            continue
        told.setdefault(text, []).append(one.device.name)
    return [text if len(told) == 1 else f"{text} ({', '.join(names)})" for text, names in told.items()]


def _shared(answers: DeviceAnswers) -> list[str]:
    recordings: dict[str, list[str]] = {}
    apart: dict[str, list[str]] = {}
    for one in answers.answers:
        recordings.setdefault(one.recorded_on, []).append(one.device.name)
        if one.apart:
            apart.setdefault(one.apart, []).append(one.device.name)
    shared = [
        f"one recording for {', '.join(names)}: that of {own}" for own, names in recordings.items() if len(names) > 1
    ]
    return [*shared, *(f"rehearsed apart, because {why}: {', '.join(names)}" for why, names in apart.items())]


def emitted(
    answers: DeviceAnswers, form: Emitted, table: Mapping[str, Mapping[str, str]]
) -> tuple[str, tuple[str, ...]]:
    """Return a request for any of the fitting devices, and the names of those that the form has no name for.

    Args:
        table: Of each device as Slurm knows it: ``gres`` (the type of ``gpu:TYPE:N``), ``constraint`` (a feature).

    Raises:
        ConfigError: Slurm cannot choose among these devices.
    """
    known = SKYPILOT if form is Emitted.SKYPILOT else table
    named = [one for one in answers.fitting if one.device.name in known]
    left_out = tuple(one.device.name for one in answers.fitting if one.device.name not in known)
    if not named:
        return "", left_out
    count = named[0].answer.ranks
    if form is Emitted.SKYPILOT:
        accelerators = ", ".join(
            f"{name}: {count}" for name in dict.fromkeys(SKYPILOT[one.device.name] for one in named)
        )
        return f"resources:\n  accelerators: {{{accelerators}}}\n", left_out
    return _sbatch({one.device.name: table[one.device.name] for one in named}, count), left_out


def _sbatch(named: Mapping[str, Mapping[str, str]], count: int) -> str:
    """Return the lines of a Slurm script: one type of GPU, or any, and the features among which Slurm chooses."""
    types = {one.get("gres", "") for one in named.values()}
    features = {name: one.get("constraint", "") for name, one in named.items()}
    if len(types) > 1 and not all(features.values()):
        without = next(name for name, feature in features.items() if not feature)
        hint = "Slurm takes one type of --gres; it chooses among features"
        raise ConfigError("making a request of Slurm", f"{without} has no constraint", "one for each device", hint)
    kind = f"gpu:{types.pop()}" if len(types) == 1 and "" not in types else "gpu"
    lines = [f"#SBATCH --gres={kind}:{count}"]
    if all(features.values()):
        lines.append(f'#SBATCH --constraint="{"|".join(dict.fromkeys(features.values()))}"')
    return "".join(f"{line}\n" for line in lines)


# The largest value of an argument with which a command fits, as lines and a table, and as JSON.


def largest_values_json(values: Sequence[LargestValue]) -> dict[str, object]:
    """Return what ``rehearse --largest --json`` prints."""
    devices = [{**asdict(one), "is_known": one.is_known} for one in values]
    return {"schema": 1, "name": values[0].name, "devices": devices}


def largest_values_document(values: Sequence[LargestValue]) -> Document:
    """Return a line for each device, and what was rehearsed."""
    blocks: list[Block] = [Line(_headline(one), "green" if one.is_known else "yellow") for one in values]
    rows = tuple((one.device.name, *_cells(tried)) for one in values for tried in one.tried)
    return Document((*blocks, "", Table(("device", values[0].name, "verdict", "required"), rows)))


def _cells(tried: TriedValue) -> tuple[str, str, str]:
    needed = "unknown" if tried.required_bytes is None else gib(tried.required_bytes)
    return str(tried.value), tried.end, needed


def _headline(one: LargestValue) -> str:
    unit = "" if not one.bytes_per_unit else f"; each more takes {one.bytes_per_unit / 2**20:,.1f} MiB"
    following, device = one.following, f"{one.device.name} ({gib(one.device.capacity_bytes)})"
    if one.largest is None:
        why = f": {following.reason}" if following is not None and following.reason else ""
        return f"no {one.name} is known to fit {device}: {following.value if following else 1} does not{why}{unit}"
    text = f"the largest {one.name} that fits {device} is {one.largest.value}"
    if following is None:
        return f"no {one.name} is too large for {device}: from {one.largest.value} on memory grows no more"
    if following.end is ValueEnd.UNKNOWN:
        known = f"the largest {one.name} known to fit {device} is {one.largest.value}"
        return f"{known}; with {following.value} that is unknown: {following.reason}{unit}"
    return f"{text}; {following.value} does not{unit}"


# What a measured step says of a device, for the terminal and as JSON.


_QUANTITIES: Final = {
    "tensor": "of its peak on tensor cores",
    "simt": "of its peak in fp32",
    "bandwidth": "of its memory bandwidth",
}


def step_calibrated_json(found: StepCalibrated) -> dict[str, object]:
    """Return it as ``calibrate --time --json`` prints it."""
    return {"schema": 2, **asdict(found.kept), "before": found.before, "estimated_s": found.estimated_s}


def step_calibrated_document(found: StepCalibrated) -> Document:
    """Return what is used from now on, and what was until now."""
    kept = found.kept
    reached = f"{kept.device} reaches {kept.value:.0%} {_QUANTITIES[kept.quantity]}"
    was = "nothing was known before" if found.before is None else f"{found.before:.0%} before"
    lines = [Line(f"{reached} ({was})", "green")]
    if found.estimated_s is not None:
        error = found.estimated_s / kept.measured_s - 1
        lines.append(
            Line(f"a step took {kept.measured_s:.3g} s; the estimate was {found.estimated_s:.3g} s, {error:+.0%}")
        )
    lines.append(Line("rehearsals on this device use it from now on"))
    return Document(tuple(lines))
