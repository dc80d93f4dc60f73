"""The folder of a saved model: card, example program, analysis of its answers."""

import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined
from torch import nn

from dryfit.settings.errors import FileError
from dryfit.settings.tables import PACKAGED_MODEL
from dryfit.settings.task_facts import facts_of, task_word
from dryfit.settings.text import Table, printable
from dryfit.settings.training_messages import ANALYSIS_FILE, Analysis, FinalRequest, FinalResult
from dryfit.settings.trial import TrialConfig, better
from dryfit.settings.version import VERSION
from dryfit.tasks.analysis import Of, analyse, analysis_tables
from dryfit.tasks.answers import HALF, threshold_names
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.causal_lm import CausalLm
from dryfit.tasks.heads import AttentionPooling, EncoderWithHead
from dryfit.tasks.prompts import parts_of
from dryfit.tasks.saved_models import ModelInput
from dryfit.tasks.scored_rows import ScoredRow, read_facts

# Texts made from the templates beside this module: model cards and programs that open a saved model.


_ENVIRONMENT = Environment(
    undefined=StrictUndefined,  # a misspelt name is an error; `huggingface_hub.ModelCard.from_template` leaves a gap
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # Markdown and Python, not HTML
)
_ENVIRONMENT.filters["json"] = json.dumps


def render(template: str, facts: Mapping[str, object]) -> str:
    """Return a template's text with its names filled in; the file is ``TEMPLATE.jinja``."""
    text = files(__package__ or "").joinpath(f"{template}.jinja").read_text("utf-8")
    return _ENVIRONMENT.from_string(text).render(facts)


# What a model does well and badly, as Markdown for its card: a few short tables; the whole is in ``analysis.json``.


_MOST: Final = {Of.CLASSES: 20, Of.THRESHOLDS: 20, Of.SPANS: 2, Of.NUMBERS: 2, Of.CRITERIA: 10, Of.WORST: 5}
"""Tables that a card has, with the most rows of each."""
_MOST_CONFUSED: Final = 8
"""A wider table of confusions is not read."""
_COLUMNS: Final = {Of.CLASSES: 5}
"""The columns of a table that a card has; else all."""
_MARKUP: Final = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def analysis_text(analysis: Analysis) -> str:
    """Return the section of a model card."""
    blocks = [_on_what(analysis)] if analysis.rows else []
    classes = analysis.classes
    for of, _, table in analysis_tables(analysis):
        if of is Of.CALIBRATION and classes is not None:
            blocks.append(f"Expected calibration error of its probabilities: {classes.ece:.4f}.")
        elif of is Of.ANSWERS and analysis.texts is not None:
            texts = analysis.texts
            blocks.append(f"Of {texts.asked} generated answers {texts.exact} are exactly as wanted.")
        elif of in _MOST or (of is Of.CONFUSION and len(table.rows) <= _MOST_CONFUSED):
            rows = table.rows[: _MOST.get(of)]
            blocks += ["The worst rows:"] if of is Of.WORST else []
            blocks.append(_markdown(Table(table.heads, rows), _COLUMNS.get(of)))
            left = (classes.classes if of is Of.CLASSES and classes is not None else len(table.rows)) - len(rows)
            if left and of in (Of.CLASSES, Of.CRITERIA):
                blocks.append(f"{left} more {of} are not listed.")
    return "\n\n".join([*blocks, *analysis.notes])


def _on_what(analysis: Analysis) -> str:
    rows = f"{analysis.rows} rows of {analysis.split}"
    chosen = ", by which its weights were chosen: its numbers are optimistic" if analysis.split != "test" else ""
    return f"On the {rows}{chosen}. All of it, with calibration and curves, is in `{ANALYSIS_FILE}`."


def _markdown(table: Table, columns: int | None) -> str:
    heads, *rows = (list(map(_plain, row[:columns])) for row in (table.heads, *table.rows))
    line = f"|---|{'--:|' * (len(heads) - 1)}"
    return "\n".join([f"| {' | '.join(heads)} |", line, *(f"| {' | '.join(row)} |" for row in rows)])


def _plain(text: str) -> str:
    """Return a text of the data as Markdown shows it: on one line, and none of it markup."""
    return _MARKUP.sub(r"\\\1", " ".join(printable(text).split()))


# What a model that is to be used does well and badly, as its training and its study say it.


def analysed(
    rows: Sequence[ScoredRow],
    split: str,
    task: Task,
    config: TrialConfig,
    *,
    fitted: Mapping[str, float],
    facts_file: str,
) -> Analysis | None:
    """Return the analysis of a split's rows; None where there are none.

    Args:
        rows: With the model's answers.
        split: Which they are.
        task: What was learned.
        config: How.
        fitted: What was chosen on validation: thresholds are taken from there.
        facts_file: File of the criteria and groups of the study's rows. Without it there are none: no baselines were
            asked for, or somebody removed them.
    """
    try:
        facts = read_facts(Path(facts_file))
    except (FileError, OSError):
        facts = None
    names = threshold_names(task.classes or 0, multi_label=config.data.multi_label)
    thresholds = [fitted.get(name, HALF) for name in names]
    labels = config.data.labels
    return analyse(rows, facts, split=split, metric=config.metric, thresholds=thresholds, labels=labels)


# The model card of a saved model: its scores, what it was trained by, and how to load it.
#
# A program that opens the folder without dryfit is written into the folder and its model card.


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
