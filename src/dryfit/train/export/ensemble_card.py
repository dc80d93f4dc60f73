"""The model card of an ensemble: its scores beside each member's own, what it is made of, and how to use it."""

from dryfit.core.jobs.ensemble import EnsembleRequest, EnsembleResult
from dryfit.core.settings.task_facts import facts_of
from dryfit.tasks.saved.model_input import MEMBERS
from dryfit.train.export.analysis_text import analysis_text
from dryfit.train.export.model_card import base_model, common_facts, score_table
from dryfit.train.export.templates import render


def ensemble_card(request: EnsembleRequest, result: EnsembleResult) -> str:
    """Return the folder's README, with the metadata that the hub reads. Nothing is looked up anywhere."""
    members, config = request.members, request.members[0].training.config
    models = [member.training.config.settings.model for member in members]
    splits = {"validation": result.validation, "test": result.test}
    bases = sorted({base for base in map(base_model, (model.name for model in models)) if base and "/" in base})
    names = {"library_name": "dryfit", "model_name": f"{request.study}-top{len(members)}"}
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
        **common_facts(config, splits, tags=["ensemble"], base_model=bases or None, **names),
        "request": request,
        "result": result,
        "members": members,
        "mean": facts_of(config.task).mean,
        "folder": MEMBERS,
        "tables": tables,
        "analysis": analysis_text(result.analysis) if result.analysis is not None else "",
        "trust": ", trust=True" if any(model.trust_remote_code for model in models) else "",
        "rows": ", ".join(f"{name} {count}" for name, count in result.rows.items()),
    }
    return render("ensemble_card.md", facts)
