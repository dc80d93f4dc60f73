"""The model card of an ensemble: its scores beside each member's own, what it is made of, and how to use it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from huggingface_hub import ModelCardData

from dryfit.core.jobs import EnsembleRequest, EnsembleResult
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.task_facts import task_word
from dryfit.core.settings.trial import TrialConfig
from dryfit.core.version import VERSION
from dryfit.tasks.saved.model_input import MEMBERS
from dryfit.train.export.model_card import base_model, evaluations, pipeline, versions

_USE = """\
import dryfit

dryfit.predict("PATH", "rows.jsonl", "predictions.jsonl"{trust})
models = dryfit.load("PATH"{trust}).members
"""
_CLASSES = "the mean of the members' probabilities of each class"
_SPANS = "the span, or none, with the highest mean of the probabilities that the members give to it"
_MEANS = {
    BuiltInTask.CRITERIA: _CLASSES,
    BuiltInTask.EVIDENCE: _SPANS,
    BuiltInTask.SHARE: f"{_CLASSES}; and {_SPANS}",
    BuiltInTask.JOINT: f"{_CLASSES}; and {_SPANS}",
}


@dataclass(frozen=True, slots=True)
class Together:
    """All that is told of an ensemble."""

    request: EnsembleRequest
    result: EnsembleResult

    @property
    def config(self) -> TrialConfig:
        """What the first member learned."""
        return self.request.members[0].training.config


def ensemble_card(told: Together) -> str:
    """The text of the folder's README, with the metadata that the hub reads. Nothing is looked up anywhere."""
    config, result, study = told.config, told.result, told.request.study
    splits = {"validation": result.validation, "test": result.test}
    bases = {base_model(member.training.config.settings.model.name) for member in told.request.members}
    data = ModelCardData(
        library_name="dryfit",
        pipeline_tag=pipeline(config.task),
        base_model=sorted(base for base in bases if base and "/" in base) or None,
        tags=["dryfit", "ensemble", task_word(config.task)],
        metrics=sorted(result.test or result.validation or {}),
        model_name=f"{study}-top{len(told.request.members)}",
        eval_results=evaluations(config, splits),
    )
    trusts = any(member.training.config.settings.model.trust_remote_code for member in told.request.members)
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {study}, an ensemble of {len(told.request.members)} models",
        "\n".join(_story(told)),
        "## Scores\n\n" + "\n\n".join(_scores(told, splits)),
        f"## How to use it\n\n```python\n{_USE.format(trust=', trust=True' if trusts else '')}```",
        "## Members\n\n" + "\n".join(_members(told)),
        "## Where it comes from\n\n" + _origin(told),
    ]
    return "\n\n".join(sections) + "\n"


def _story(told: Together) -> Iterator[str]:
    config = told.config
    mean = _MEANS[config.task] if isinstance(config.task, BuiltInTask) else task_word(config.task)
    yield f"{len(told.request.members)} models of the task {task_word(config.task)}, fine-tuned by dryfit {VERSION}."
    yield f"What it says of a row is {mean}."
    yield f"Each member is a saved model of its own, in `{MEMBERS}/`."
    yield f"They are the best of the study by {config.metric} on validation in the search, without repetitions:"
    yield "values that they were chosen by, and so optimistic ones."
    if told.request.with_validation:
        yield "Each was trained on train and validation together, so nothing of the mean was chosen by validation."


def _scores(told: Together, splits: Mapping[str, Mapping[str, float] | None]) -> Iterator[str]:
    members = told.request.members
    if all(metrics is None for metrics in splits.values()):
        yield "None: validation was trained on, and the data has no test split."
    heads = " | ".join(["ensemble", *(f"trial {member.training.config.number}" for member in members)])
    for split, metrics in splits.items():
        if metrics is None:
            continue
        own = [getattr(member.result, split) or {} for member in members]
        lines = [f"| {split} ({told.result.rows[split]} rows) | {heads} |", "|---|" + "--:|" * (len(members) + 1)]
        for name in sorted({name for one in own for name in one} | set(metrics)):
            values = (f"{one[name]:.6f}" if name in one else "-" for one in (metrics, *own))
            lines.append(f"| {name} | {' | '.join(values)} |")
        yield "\n".join(lines)
    if told.result.test is not None:
        yield "Test chose nothing: the members are those of the search, and each read it once, after training."


def _members(told: Together) -> Iterator[str]:
    yield "The README of each has its whole configuration."
    yield ""
    for place, member in enumerate(told.request.members, start=1):
        config = member.training.config
        searched = "" if member.searched is None else f", {config.metric} {member.searched:.6f} in the search"
        drawn = ", ".join(f"{name} = {json.dumps(value)}" for name, value in sorted(config.params.items()))
        at = f"`{MEMBERS}/{place}`: trial {config.number}, seed {config.seed}{searched}"
        yield f"- {at}{f'; {drawn}' if drawn else ''}"


def _origin(told: Together) -> str:
    rows = ", ".join(f"{name} {count}" for name, count in told.result.rows.items())
    return "\n".join(
        [
            f"- study `{told.request.study}`",
            f"- data: fingerprint `{told.config.data_fingerprint}`{f', rows: {rows}' if rows else ''}",
            f"- device {told.request.members[0].training.plan.device}",
            f"- {versions()}",
        ]
    )
