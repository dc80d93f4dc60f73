"""The model card of a saved model: its scores, what it was trained by, and how to load it.

A program that opens the folder without dryfit is written into the folder and its model card.
"""

import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from torch import nn

from dryfit.core.jobs.train import FinalRequest, FinalResult
from dryfit.core.settings.tables import PACKAGED_MODEL
from dryfit.core.settings.task_facts import facts_of, task_word
from dryfit.core.settings.trial import TrialConfig, better
from dryfit.core.version import VERSION
from dryfit.tasks.base import TaskModel
from dryfit.tasks.heads import AttentionPooling, EncoderWithHead
from dryfit.tasks.lm.causal_lm import CausalLm
from dryfit.tasks.rows.prompts import parts_of
from dryfit.tasks.saved.model_input import ModelInput
from dryfit.train.export.analysis_text import analysis_text
from dryfit.train.export.templates import render

_POOLING = {
    "cls": "hidden_BLD[:, 0]",
    "cls_last": "hidden_BLD[torch.arange(len(mask_BL)), mask_BL.sum(dim=1) - 1]",
    "mean": "(hidden_BLD * mask_BL[:, :, None]).sum(dim=1) / mask_BL.sum(dim=1, keepdim=True)",
    "attention": "(hidden_BLD, mask_BL)",
    "max": "hidden_BLD.masked_fill(mask_BL[:, :, None] == 0, torch.finfo(hidden_BLD.dtype).min).amax(dim=1)",
}
_ACTIVATIONS = {
    "gelu": "torch.nn.GELU()",
    "relu": "torch.nn.ReLU()",
    "tanh": "torch.nn.Tanh()",
    "silu": "torch.nn.SiLU()",
}
_PROMPTS = {"criteria": "criteria_prompt", "both": "criteria_prompt", "evidence": "evidence_prompt"}


def example(config: TrialConfig, read: ModelInput, model: TaskModel) -> str | None:
    """Return a program that opens the folder without dryfit and predicts one row; it is run inside the folder.

    None for models that have more than one encoder or head, and for tasks of the user's own.

    Args:
        config: What was learned.
        read: What the model reads.
        model: The model itself.
    """
    trust = ", trust_remote_code=True" if config.settings.model.trust_remote_code else ""
    if isinstance(model, CausalLm):
        return _lm_example(read, model, trust)
    if not isinstance(model, EncoderWithHead) or facts_of(config.task).own:
        return None
    spec = model.spec
    pooling = "cls_last" if spec.settings.pooling == "cls" and spec.cls_last else spec.settings.pooling
    facts = {
        "trust": trust,
        "read": read,
        "spec": spec,
        "names": ["input_ids", "attention_mask", *(["token_type_ids"] if model.takes_types else [])],
        "layers": [_layer(layer, spec.settings.activation) for layer in model.head],
        "pooled": _POOLING[pooling],
    }
    return render("encoder_example.py", facts)


def _layer(layer: nn.Module, activation: str) -> str:
    """Return one of the head's layers as code; dropout does nothing outside training, but takes a place."""
    match layer:
        case nn.Linear():
            return f"torch.nn.Linear({layer.in_features}, {layer.out_features})"
        case nn.Dropout():
            return "torch.nn.Identity()"
        case AttentionPooling():
            return f"AttentionPooling({layer.project.in_features})"
        case _:
            return _ACTIVATIONS[activation]


def _lm_example(read: ModelInput, model: CausalLm, trust: str) -> str:
    lm = read.settings.lm
    if lm.format in _PROMPTS:
        prompt = f"{getattr(lm, _PROMPTS[lm.format])!r}.format(criterion='a criterion', text='A text.')"
    else:
        prompt = repr("An instruction." if lm.format == "instruction" else "A text")
    chats = lm.chat != "off" and lm.format != "text"
    adapted = model.adapted() is not None
    return render("lm_example.py", {"trust": trust, "lm": lm, "prompt": prompt, "chats": chats, "adapted": adapted})


README_FILE = "README.md"
EXAMPLE_FILE = "example.py"

_MINILM_ID = "sentence-transformers/all-MiniLM-L6-v2"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_VERSIONED = ("torch", "transformers", "tokenizers", "safetensors", "scikit-learn")


@dataclass(frozen=True, slots=True)
class Trained:
    """What a model card is written from.

    Attributes:
        request: What was asked for.
        result: What came of it.
        model_input: What the model reads.
        model: The model itself.
    """

    request: FinalRequest
    result: FinalResult
    model_input: ModelInput
    model: TaskModel

    def texts(self) -> dict[str, str]:
        """Return the text files of the model's folder by name: its README, and the program that opens it."""
        program = example(self.request.training.config, self.model_input, self.model)
        readme = {README_FILE: _model_card(self, program)}
        return readme if program is None else {**readme, EXAMPLE_FILE: program}


def _model_card(trained: Trained, program: str | None) -> str:
    """Return the folder's README, with the metadata that the hub reads. Nothing is looked up anywhere."""
    request, result, model = trained.request, trained.result, trained.model
    config, splits = request.training.config, {"validation": result.validation, "test": result.test}
    base = base_model(config.settings.model.name)
    scored = {name: metrics for name, metrics in splits.items() if metrics is not None}
    heads = [f"{name} ({result.rows[name]} rows)" for name in scored]
    settings = json.loads(config.settings.model_dump_json(exclude_none=True))
    if settings["model"]["name"] != PACKAGED_MODEL:  # which a study file names so
        settings["model"]["name"] = base
    lm = trained.model_input.settings.lm
    names = {"library_name": "transformers", "model_name": f"{request.study}-trial-{config.number}"}
    facts = {
        **common_facts(config, splits, base_model=base if base and "/" in base else None, **names),
        "request": request,
        "worthless": _is_worthless(request),
        "result": result,
        "read": trained.model_input,
        "base": base,
        "lm_parts": " and ".join(part.name.lower() for part in parts_of(lm)) if isinstance(model, CausalLm) else "",
        "adapted": isinstance(model, CausalLm) and model.adapted() is not None,
        "scores": score_table("metric", heads, list(scored.values())) if scored else "",
        "trust": ", trust=True" if facts_of(config.task).own else "",  # its class must lie where this is run
        "program": program,
        "settings": settings,
        "analysis": analysis_text(result.analysis) if result.analysis is not None else "",
        "rows": ", ".join(f"{name} {count}" for name, count in result.rows.items() if name != "trained"),
    }
    return render("model_card.md", facts)


def _is_worthless(request: FinalRequest) -> bool:
    """Whether the configuration is known not to have beaten the strongest baseline in the search."""
    if request.searched is None or request.baseline is None:
        return False
    return not better(request.searched, request.baseline[0], request.training.config.direction)


def common_facts(
    config: TrialConfig,
    splits: Mapping[str, Mapping[str, float] | None],
    **metadata: Any,
) -> dict[str, object]:
    """Return what every card says: the metadata that the hub reads, the task, and what computed the scores.

    Args:
        config: What was learned.
        splits: The metrics of each split; None: it was not scored.
        metadata: Further fields of ``ModelCardData``.
    """
    data = ModelCardData(
        pipeline_tag=facts_of(config.task).pipeline,
        tags=["dryfit", task_word(config.task)],
        metrics=sorted(splits["test"] or splits["validation"] or {}),
        eval_results=_evaluations(config, splits),
        **metadata,
    )
    return {
        "metadata": data.to_yaml(),
        "version": VERSION,
        "config": config,
        "task": task_word(config.task),
        "versions": _versions(),
    }


def score_table(corner: str, heads: Iterable[str], columns: Sequence[Mapping[str, float]]) -> str:
    """Return metrics as a Markdown table with a row for each metric; ``-`` where a column lacks it."""
    lines = [f"| {' | '.join([corner, *heads])} |", "|---|" + "--:|" * len(columns)]
    for name in sorted({name for column in columns for name in column}):
        values = (f"{column[name]:.6f}" if name in column else "-" for column in columns)
        lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(lines)


def base_model(name: str) -> str | None:
    """Return the encoder's public name; of a folder its last part only, as the path is nobody's business."""
    if name == PACKAGED_MODEL:
        return _MINILM_ID
    return name if _HUB_ID.fullmatch(name) else name.rstrip("/").rpartition("/")[2] or None


def _evaluations(config: TrialConfig, splits: Mapping[str, Mapping[str, float] | None]) -> list[EvalResult]:
    """Return metrics of some splits as the hub reads them."""
    return [
        EvalResult(
            task_type=facts_of(config.task).pipeline or "other",
            dataset_type="private",
            dataset_name=f"data {config.data_fingerprint}",
            dataset_split=split,
            metric_type=name,
            metric_value=value,
        )
        for split, metrics in splits.items()
        for name, value in sorted((metrics or {}).items())
    ]


def _versions() -> str:
    """Return the versions of what computed a model's scores."""
    of_libraries = ", ".join(f"{name} {version(name)}" for name in _VERSIONED)
    return f"dryfit {VERSION}, Python {platform.python_version()}, {of_libraries}"
