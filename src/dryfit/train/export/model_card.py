"""What a saved model says of itself: a model card, and how to open it with plain Python."""

import json
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from huggingface_hub import EvalResult, ModelCardData
from torch import nn

from dryfit.core.jobs import FinalRequest, FinalResult
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.tables import PACKAGED_MODEL, Settings
from dryfit.core.settings.task_facts import TaskName, is_own, task_word
from dryfit.core.settings.trial import TrialConfig
from dryfit.core.version import VERSION
from dryfit.tasks.base import TaskModel
from dryfit.tasks.heads import AttentionPooling, EncoderWithHead
from dryfit.tasks.lm.causal_lm import CausalLm
from dryfit.tasks.saved.model_input import ModelInput
from dryfit.train.export.lm_card import lm_example, lm_story

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

model = dryfit.load("PATH"{trust})
dryfit.predict("PATH", "rows.jsonl", "predictions.jsonl"{trust})
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

_PIPELINES = {BuiltInTask.EVIDENCE: "question-answering", BuiltInTask.CAUSAL_LM: "text-generation"}
_OF_ROWS = """\
tokens = TOKENIZER(TEXTS, truncation=TRUNCATION, max_length=LENGTH, padding=True, return_tensors="pt")
inputs = {name: tokens[name] for name in NAMES if name in tokens}
with torch.no_grad():
    hidden_BLD, mask_BL = encoder(**inputs)[0], tokens["attention_mask"]
    scores_BC = head.eval()(POOLED)
print(PROBABILITIES.tolist())
"""
# Of one window, and its best span: dryfit merges those of all windows of a text, and knows when to answer with none.
_OF_TOKENS = """\
text = TEXT
tokens = TOKENIZER(
    ASKEDtext, truncation=TRUNCATION, max_length=LENGTH, return_offsets_mapping=True, return_tensors="pt")
inputs = {name: tokens[name] for name in NAMES if name in tokens}
with torch.no_grad():
    starts_L, ends_L = head.eval()(encoder(**inputs)[0])[0].T
own_L = torch.tensor([part == OWN for part in tokens.sequence_ids(0)])
pairs_LL = starts_L[:, None] + ends_L[None, :]
ordered_LL = torch.ones_like(pairs_LL).triu().tril(MOST - 1) > 0
pairs_LL = pairs_LL.masked_fill(~(ordered_LL & own_L[:, None] & own_L[None, :]), -torch.inf)
start, end = divmod(int(pairs_LL.argmax()), len(starts_L))
span = int(tokens["offset_mapping"][0, start, 0]), int(tokens["offset_mapping"][0, end, 1])
none = float(starts_L[NULL] + ends_L[NULL])
print({"span": span, "text": text[slice(*span)], "score": float(pairs_LL.max()), "null_score": none})
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


def example(trained: Trained) -> str | None:
    """A program that opens the folder without dryfit and predicts one row; run it inside the folder.

    None for models of which more than one encoder or head would have to be told.
    """
    model = trained.model
    if isinstance(model, CausalLm):
        return lm_example(trained.model_input, model, trust=trained.config.settings.model.trust_remote_code)
    if not isinstance(model, EncoderWithHead) or is_own(trained.config.task):
        return None
    pools = model.spec.settings.pooling == "attention" and not model.spec.per_token
    trust = ", trust_remote_code=True" if trained.config.settings.model.trust_remote_code else ""
    lines = [
        "import torch",
        "from safetensors.torch import load_file",
        "from transformers import AutoConfig, AutoModel, AutoTokenizer",
        "",
        *(_ATTENTION_POOLING.splitlines() if pools else []),
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
        *_prediction(trained, model, trust).splitlines(),
    ]
    return "\n".join(lines) + "\n"


def _prediction(trained: Trained, model: EncoderWithHead, trust: str) -> str:
    """The end of the program: from one row to what is said of it."""
    read, spec = trained.model_input, model.spec
    alone = read.criterion is None
    pooling = "cls_last" if spec.settings.pooling == "cls" and spec.cls_last else spec.settings.pooling
    words = {
        "TOKENIZER": f"AutoTokenizer.from_pretrained(folder{trust})",
        "TRUNCATION": "True" if alone else '"only_second"',
        "LENGTH": str(read.max_length),
        "NAMES": str(["input_ids", "attention_mask", *(["token_type_ids"] if model.takes_types else [])]),
    }
    if spec.per_token:
        words |= {
            "TEXT": json.dumps("A text."),
            "ASKED": "" if alone else f"{json.dumps('a criterion')}, ",
            "OWN": "0" if alone else "1",
            "MOST": str(read.settings.span.max_answer_len),
            "NULL": "-1" if spec.cls_last else "0",
        }
        return _filled(_OF_TOKENS, words)
    words |= {
        "TEXTS": '["A text."]' if alone else '["a criterion"], ["A text."]',
        "POOLED": _POOLING[pooling],
        "PROBABILITIES": "scores_BC.sigmoid()" if read.multi_label else "scores_BC.softmax(dim=-1)",
    }
    return _filled(_OF_ROWS, words)


def _filled(template: str, words: Mapping[str, str]) -> str:
    return re.sub("|".join(sorted(words, key=len, reverse=True)), lambda found: words[found[0]], template)


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
    base = base_model(config.settings.model.name)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=pipeline(config.task),
        base_model=base if base and "/" in base else None,
        tags=["dryfit", task_word(config.task)],
        metrics=sorted(result.test or result.validation or {}),
        model_name=f"{trained.request.study}-trial-{config.number}",
        eval_results=evaluations(config, {"validation": result.validation, "test": result.test}),
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {trained.request.study}, trial {config.number}",
        _story(trained, base),
        "## Scores\n\n" + _scores(trained),
        f"## How to load it\n\nWith dryfit:\n\n```python\n{_with_dryfit(trained)}```",
        *_without_dryfit(trained),
        "## Configuration\n\n" + _configuration(config.settings),
        "## Where it comes from\n\n" + _origin(trained),
    ]
    return "\n\n".join(sections) + "\n"


def _with_dryfit(trained: Trained) -> str:
    own = is_own(trained.config.task)  # its class is to be had where this is run
    return _WITH_DRYFIT.format(trust=", trust=True" if own else "")


def _without_dryfit(trained: Trained) -> Iterator[str]:
    program = example(trained)
    if program is not None:
        yield f"Without dryfit (this is `{EXAMPLE_FILE}`, to be run in this folder):\n\n```python\n{program}```"


def pipeline(task: TaskName) -> str | None:
    """The hub's word for what the model does; None: it has none."""
    return _PIPELINES.get(task, "text-classification") if isinstance(task, BuiltInTask) else None


def base_model(name: str) -> str | None:
    """The encoder's public name; of a folder its last part only, as the path is nobody's business."""
    if name == PACKAGED_MODEL:
        return _MINILM_ID
    return name if _HUB_ID.fullmatch(name) else name.rstrip("/").rpartition("/")[2] or None


def evaluations(config: TrialConfig, splits: Mapping[str, Mapping[str, float] | None]) -> list[EvalResult]:
    """Metrics of some splits as the hub reads them."""
    return [
        EvalResult(
            task_type=pipeline(config.task) or "other",
            dataset_type="private",
            dataset_name=f"data {config.data_fingerprint}",
            dataset_split=split,
            metric_type=name,
            metric_value=value,
        )
        for split, metrics in splits.items()
        for name, value in sorted((metrics or {}).items())
    ]


def _story(trained: Trained, base: str | None) -> str:
    config, result, read, folds = trained.config, trained.result, trained.model_input, trained.request.folds
    reads = f"`{read.text}`" if read.criterion is None else f"`{read.criterion}` and `{read.text}`"
    weights = f"the weights are those of step {result.step} of {result.training.steps}"
    about = [
        f"{base or 'An encoder'} {_head_words(config)}, fine-tuned by dryfit {VERSION}.",
        f"It reads {reads}, {_cut_words(config, read)}.",
    ]
    if isinstance(trained.model, CausalLm):
        about = lm_story(read, trained.model, base)
    lines = [
        *about,
        f"Trained on {result.rows['trained']} rows with seed {config.seed}; {weights}.",
    ]
    if result.validation is None:
        lines.append(
            "Train and validation were trained on together. So there was nothing to choose the best weights by:"
        )
        searched = "the trial's best" if folds == 1 else "on average the best of the trial's folds"
        lines.append(f"training ended with the step that was {searched} in the search.")
    if trained.request.searched is not None:
        where = "on validation" if folds == 1 else f"in the mean over {folds} folds of train and validation"
        lines.append(f"In the search its {config.metric} {where} was {trained.request.searched:.6f}:")
        lines.append("a value that it was chosen by, and so an optimistic one.")
    return "\n".join(lines)


def _head_words(config: TrialConfig) -> str:
    match config.task:
        case BuiltInTask.CRITERIA:
            return f"with a head for {config.data.num_labels} classes"
        case BuiltInTask.EVIDENCE:
            return "with a head for where spans of a text start and end"
        case task:
            return f"for the task {task_word(task)}"


def _cut_words(config: TrialConfig, read: ModelInput) -> str:
    if config.task is BuiltInTask.EVIDENCE:
        shared = config.settings.span.doc_stride
        return f"in windows of {read.max_length} tokens of which two share {shared} of the text"
    return f"cut to {read.max_length} tokens"


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
    tables["model"]["name"] = name if _HUB_ID.fullmatch(name) else base_model(name)
    lines = ["```toml"]
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), ""]
    return "\n".join([*lines[:-1], "```"])


def _origin(trained: Trained) -> str:
    config = trained.config
    rows = ", ".join(f"{name} {count}" for name, count in trained.result.rows.items() if name != "trained")
    return "\n".join(
        [
            f"- study `{trained.request.study}`, trial {config.number}, configuration `{config.fingerprint}`",
            f"- data: fingerprint `{config.data_fingerprint}`, rows: {rows}",
            f"- seed {config.seed}, device {trained.request.training.plan.device}",
            f"- {versions()}",
        ]
    )


def versions() -> str:
    """What computed a model's scores."""
    of_libraries = ", ".join(f"{name} {version(name)}" for name in _VERSIONED)
    return f"dryfit {VERSION}, Python {platform.python_version()}, {of_libraries}"
