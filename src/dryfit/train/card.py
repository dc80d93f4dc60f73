"""What a saved model says of itself: a model card, and how to open it with plain Python."""

import json
import platform
import re
from dataclasses import dataclass
from importlib.metadata import version

from huggingface_hub import EvalResult, ModelCardData
from torch import nn

from dryfit.core.jobs import FinalRequest, FinalResult
from dryfit.core.settings import PACKAGED_MODEL, Settings
from dryfit.core.trial import TrialConfig
from dryfit.core.version import VERSION
from dryfit.tasks.base import TaskModel
from dryfit.tasks.causal_lm import CausalLm
from dryfit.tasks.heads import AttentionPooling, EncoderWithHead
from dryfit.tasks.model_input import ModelInput
from dryfit.train.lm_card import lm_example, lm_story

README_FILE = "README.md"
EXAMPLE_FILE = "example.py"

_MINILM_ID = "sentence-transformers/all-MiniLM-L6-v2"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_VERSIONED = ("torch", "transformers", "tokenizers", "safetensors", "scikit-learn")
_POOLING = {
    "cls": "hidden_BLD[:, 0]",
    "cls_last": "hidden_BLD[torch.arange(len(mask_BL)), mask_BL.sum(dim=1) - 1]",
    "mean": "(hidden_BLD * mask_BL[:, :, None]).sum(dim=1) / mask_BL.sum(dim=1, keepdim=True)",
    "attention": "(hidden_BLD, mask_BL)",
    "max": "hidden_BLD.masked_fill(mask_BL[:, :, None] == 0, torch.finfo(hidden_BLD.dtype).min).amax(dim=1)",
}
_WITH_DRYFIT = """\
import dryfit

model = dryfit.load("PATH")
dryfit.predict("PATH", "rows.jsonl", "predictions.jsonl")
"""
_ACTIVATIONS = {
    "gelu": "torch.nn.GELU()",
    "relu": "torch.nn.ReLU()",
    "tanh": "torch.nn.Tanh()",
    "silu": "torch.nn.SiLU()",
}
_ATTENTION_POOLING = """\
class AttentionPooling(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.project, self.query = torch.nn.Linear(width, width), torch.nn.Linear(width, 1, bias=False)

    def forward(self, tokens):
        hidden_BLD, mask_BL = tokens
        scores_BL = self.query(torch.tanh(self.project(hidden_BLD))).squeeze(-1)
        scores_BL = scores_BL.masked_fill(mask_BL == 0, torch.finfo(scores_BL.dtype).min)
        return (hidden_BLD * scores_BL.softmax(dim=1).unsqueeze(-1)).sum(dim=1)

"""


@dataclass(frozen=True, slots=True)
class Trained:
    """All that is told of a model.

    Attributes:
        request: What was asked for.
        result: What came of it.
        model_input: What it reads.
        model: The model itself.
    """

    request: FinalRequest
    result: FinalResult
    model_input: ModelInput
    model: TaskModel

    @property
    def config(self) -> TrialConfig:
        """What was learned."""
        return self.request.training.config


def example(trained: Trained) -> str:
    """A program that opens the folder without dryfit and classifies one row; run it inside the folder."""
    read, model = trained.model_input, trained.model
    if isinstance(model, CausalLm):
        return lm_example(read, model, trust=trained.config.settings.model.trust_remote_code)
    assert isinstance(model, EncoderWithHead)
    names = ["input_ids", "attention_mask"]
    if model.takes_types:
        names.append("token_type_ids")
    texts = '["A text."]' if read.criterion is None else '["a criterion"], ["A text."]'
    truncation = "True" if read.criterion is None else '"only_second"'
    spec = model.spec
    pooling = "cls_last" if spec.settings.pooling == "cls" and spec.cls_last else spec.settings.pooling
    trust = ", trust_remote_code=True" if trained.config.settings.model.trust_remote_code else ""
    lines = [
        "import torch",
        "from safetensors.torch import load_file",
        "from transformers import AutoConfig, AutoModel, AutoTokenizer",
        "",
        *(_ATTENTION_POOLING.splitlines() if pooling == "attention" else []),
        'folder = "."',
        'weights = load_file(f"{folder}/model.safetensors")',
        'parts = {part: {name.removeprefix(f"{part}."): value for name, value in weights.items()',
        '                if name.startswith(f"{part}.")} for part in ("encoder", "head")}',
        f"encoder = AutoModel.from_config(AutoConfig.from_pretrained(folder{trust}){trust}).eval()",
        'lacks = encoder.load_state_dict(parts["encoder"], strict=False)',
        'assert not lacks.unexpected_keys and all("pooler" in name for name in lacks.missing_keys)',
        f"head = torch.nn.Sequential({', '.join(_layers(model))})",
        'head.load_state_dict(parts["head"])',
        "",
        f"tokens = AutoTokenizer.from_pretrained(folder{trust})(",
        f'    {texts}, truncation={truncation}, max_length={read.max_length}, padding=True, return_tensors="pt")',
        f"inputs = {{name: tokens[name] for name in {names} if name in tokens}}",
        "with torch.no_grad():",
        '    hidden_BLD, mask_BL = encoder(**inputs)[0], tokens["attention_mask"]',
        f"    scores_BC = head.eval()({_POOLING[pooling]})",
        f"print({'scores_BC.sigmoid()' if read.multi_label else 'scores_BC.softmax(dim=-1)'}.tolist())",
    ]
    return "\n".join(lines) + "\n"


def _layers(model: EncoderWithHead) -> list[str]:
    """The head's layers as code; dropout does nothing outside training, but takes a place."""
    found: list[str] = []
    for layer in model.head:
        if isinstance(layer, nn.Linear):
            found.append(f"torch.nn.Linear({layer.in_features}, {layer.out_features})")
        elif isinstance(layer, nn.Dropout):
            found.append("torch.nn.Identity()")
        elif isinstance(layer, AttentionPooling):
            found.append(f"AttentionPooling({layer.project.in_features})")
        else:
            found.append(_ACTIVATIONS[model.spec.settings.activation])
    return found


def model_card(trained: Trained) -> str:
    """The text of the folder's README, with the metadata that the hub reads. Nothing is looked up anywhere."""
    config, result = trained.config, trained.result
    base = _base_model(config.settings.model.name)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=_pipeline(trained),
        base_model=base if base and "/" in base else None,
        tags=["dryfit", str(config.task)],
        metrics=sorted(result.test or result.validation or {}),
        model_name=f"{trained.request.study}-trial-{config.number}",
        eval_results=_evaluations(trained),
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {trained.request.study}, trial {config.number}",
        _story(trained, base),
        "## Scores\n\n" + _scores(trained),
        f"## How to load it\n\nWith dryfit:\n\n```python\n{_WITH_DRYFIT}```",
        f"Without dryfit (this is `{EXAMPLE_FILE}`, to be run in this folder):\n\n```python\n{example(trained)}```",
        "## Configuration\n\n" + _configuration(config.settings),
        "## Where it comes from\n\n" + _origin(trained),
    ]
    return "\n\n".join(sections) + "\n"


def _pipeline(trained: Trained) -> str:
    return "text-generation" if isinstance(trained.model, CausalLm) else "text-classification"


def _base_model(name: str) -> str | None:
    """The encoder's public name; of a folder its last part only, as the path is nobody's business."""
    if name == PACKAGED_MODEL:
        return _MINILM_ID
    return name if _HUB_ID.fullmatch(name) else name.rstrip("/").rpartition("/")[2] or None


def _evaluations(trained: Trained) -> list[EvalResult]:
    splits = (("validation", trained.result.validation), ("test", trained.result.test))
    return [
        EvalResult(
            task_type=_pipeline(trained),
            dataset_type="private",
            dataset_name=f"data {trained.config.data_fingerprint}",
            dataset_split=split,
            metric_type=name,
            metric_value=value,
        )
        for split, metrics in splits
        for name, value in sorted((metrics or {}).items())
    ]


def _story(trained: Trained, base: str | None) -> str:
    config, result, read = trained.config, trained.result, trained.model_input
    reads = f"`{read.text}`" if read.criterion is None else f"`{read.criterion}` and `{read.text}`"
    about = [
        f"{base or 'An encoder'} with a head for {config.data.num_labels} classes, fine-tuned by dryfit {VERSION}.",
        f"It reads {reads}, cut to {read.max_length} tokens.",
    ]
    if isinstance(trained.model, CausalLm):
        about = lm_story(read, trained.model, base)
    weights = f"the weights are those of step {result.step} of {result.training.steps}"
    lines = [
        *about,
        f"Trained on {result.rows['trained']} rows with seed {config.seed}; {weights}.",
    ]
    if result.validation is None:
        lines.append(
            "Train and validation were trained on together. So there was nothing to choose the best weights by:"
        )
        lines.append("training ended with the step that was the trial's best in the search.")
    if trained.request.searched is not None:
        lines.append(f"In the search its {config.metric} on validation was {trained.request.searched:.6f}:")
        lines.append("a value that it was chosen by, and so an optimistic one.")
    return "\n".join(lines)


def _scores(trained: Trained) -> str:
    splits = {"validation": trained.result.validation, "test": trained.result.test}
    told = {name: metrics for name, metrics in splits.items() if metrics is not None}
    if not told:
        return "None: validation was trained on, and the data has no test split."
    names = sorted({metric for metrics in told.values() for metric in metrics})
    rows = [f"| metric | {' | '.join(f'{name} ({trained.result.rows[name]} rows)' for name in told)} |"]
    rows.append("|---|" + "--:|" * len(told))
    rows += [f"| {name} | {' | '.join(f'{told[split][name]:.6f}' for split in told)} |" for name in names]
    note = "Test was read once, after training." if "test" in told else "The data has no test split."
    return "\n".join([*rows, "", note])


def _configuration(settings: Settings) -> str:
    """Every table as TOML, ready for a study file; the model's own folder by its last part."""
    tables: dict[str, dict[str, object]] = json.loads(settings.model_dump_json(exclude_none=True))
    name = str(tables["model"]["name"])
    tables["model"]["name"] = name if _HUB_ID.fullmatch(name) else _base_model(name)
    lines = ["```toml"]
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), ""]
    return "\n".join([*lines[:-1], "```"])


def _origin(trained: Trained) -> str:
    config = trained.config
    versions = ", ".join(f"{name} {version(name)}" for name in _VERSIONED)
    rows = ", ".join(f"{name} {count}" for name, count in trained.result.rows.items() if name != "trained")
    return "\n".join(
        [
            f"- study `{trained.request.study}`, trial {config.number}, configuration `{config.fingerprint}`",
            f"- data: fingerprint `{config.data_fingerprint}`, rows: {rows}",
            f"- seed {config.seed}, device {trained.request.training.plan.device}",
            f"- dryfit {VERSION}, Python {platform.python_version()}, {versions}",
        ]
    )
