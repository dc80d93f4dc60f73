"""The model card of an ensemble: its scores beside each member's own, what it is made of, and how to use it."""

from huggingface_hub import ModelCardData

from dryfit.core.jobs.ensemble import EnsembleRequest, EnsembleResult
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.task_facts import task_word
from dryfit.core.version import VERSION
from dryfit.tasks.saved.model_input import MEMBERS
from dryfit.train.export.model_card import base_model, evaluations, pipeline, score_table, versions
from dryfit.train.export.templates import render

_CLASSES = "the mean of the members' probabilities of each class"
_SPANS = "the span, or none, with the highest mean of the probabilities that the members give to it"
_MEANS = {
    BuiltInTask.CRITERIA: _CLASSES,
    BuiltInTask.EVIDENCE: _SPANS,
    BuiltInTask.SHARE: f"{_CLASSES}; and {_SPANS}",
    BuiltInTask.JOINT: f"{_CLASSES}; and {_SPANS}",
}


def ensemble_card(request: EnsembleRequest, result: EnsembleResult) -> str:
    """Return the folder's README, with the metadata that the hub reads. Nothing is looked up anywhere."""
    members, config = request.members, request.members[0].training.config
    models = [member.training.config.settings.model for member in members]
    splits = {"validation": result.validation, "test": result.test}
    data = ModelCardData(
        library_name="dryfit",
        pipeline_tag=pipeline(config.task),
        base_model=sorted({base for base in map(base_model, (model.name for model in models)) if base and "/" in base})
        or None,
        tags=["dryfit", "ensemble", task_word(config.task)],
        metrics=sorted(result.test or result.validation or {}),
        model_name=f"{request.study}-top{len(members)}",
        eval_results=evaluations(config, splits),
    )
    heads = ["ensemble", *(f"trial {member.training.config.number}" for member in members)]
    tables = [
        score_table(
            f"{split} ({result.rows[split]} rows)",
            heads,
            [metrics, *(getattr(member.result, split) or {} for member in members)],
        )
        for split, metrics in splits.items()
        if metrics is not None
    ]
    facts = {
        "metadata": data.to_yaml(),
        "version": VERSION,
        "request": request,
        "result": result,
        "members": members,
        "config": config,
        "task": task_word(config.task),
        "mean": _MEANS[config.task] if isinstance(config.task, BuiltInTask) else task_word(config.task),
        "folder": MEMBERS,
        "tables": tables,
        "trust": ", trust=True" if any(model.trust_remote_code for model in models) else "",
        "rows": ", ".join(f"{name} {count}" for name, count in result.rows.items()),
        "versions": versions(),
    }
    return render("ensemble_card.md", facts)
