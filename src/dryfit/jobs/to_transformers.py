"""Child job EXPORT: save a trained model for plain transformers, with the same scores, or say why that cannot be."""

import copy
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ConfigError
from dryfit.core.jobs.export import ExportRequest, ExportResult
from dryfit.core.wire import Note, Phase, empty_beside, publish_folder
from dryfit.jobs.merge import merged
from dryfit.jobs.own_heads import with_own_head
from dryfit.meta.loading.pretrained import Kind
from dryfit.tasks.base import TaskModel
from dryfit.tasks.heads import EncoderModel, EncoderWithHead
from dryfit.tasks.lm.causal_lm import CausalLm
from dryfit.tasks.saved.model_input import ModelInput, read_model_input
from dryfit.tasks.saved.saved_model import copy_tokenizer, load
from dryfit.train.export.model_card import README_FILE

_ENCODER = "transformers-encoder"
_SPAN = 2


def export(body: ExportRequest, channel: ChildChannel) -> ExportResult:
    """Save a model for plain transformers; the folder appears by one rename, when it is complete.

    Raises:
        LoadError: The folder is not one that dryfit saved.
        ConfigError: The model cannot be said in the classes of transformers; what of it can is said.
    """
    torch.set_num_threads(body.threads)
    channel.send(Phase(name="load"))
    folder, target = Path(body.model_dir), Path(body.out)
    doing = f"exporting {folder} to transformers"
    read = read_model_input(folder).with_task_folder(folder, trust=body.trust)
    model = load(folder, dtype=torch.float32, trust=body.trust)
    assert isinstance(model, TaskModel)  # the folder has a dryfit.json
    channel.beat()
    if body.encoder_alone:
        parts, loaded_by = _encoders(model, doing), "AutoModel"
    else:
        parts, loaded_by = _whole(model, read, doing, trust=body.trust)
    channel.send(Phase(name="save"))
    temporary = empty_beside(target)
    for part, plain in parts.items():
        plain.save_pretrained(temporary / part)
        copy_tokenizer(folder / part, temporary / part)
    for note in _remarks(read, encoder_alone=body.encoder_alone):
        channel.send(Note(text=note))
    publish_folder(temporary, target, {README_FILE: _readme(read, loaded_by, types=model.takes_types)})
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return ExportResult(out=str(target), loaded_by=loaded_by, size_bytes=size)


def _encoders(model: TaskModel, doing: str) -> dict[str, PreTrainedModel]:
    """Return a model's encoders by the folders that they are saved in.

    Raises:
        ConfigError: It is a decoder.
    """
    if isinstance(model, CausalLm):
        raise ConfigError(doing, "it is a decoder, with no head of ours", "all of it", "--to transformers")
    return dict(model.pretrained())


def _whole(model: TaskModel, read: ModelInput, doing: str, *, trust: bool) -> tuple[dict[str, PreTrainedModel], str]:
    """Return a model in a class of transformers, and the class that loads it.

    Raises:
        ConfigError: There is none that computes the same.
    """
    if isinstance(model, CausalLm):
        plain = model.base() if model.adapted() is None else merged(model, read)
        return {"": plain}, "AutoModelForCausalLM"
    hint = f"its encoder alone: --to {_ENCODER}" if isinstance(model, EncoderModel) else f"try --to {_ENCODER}"
    if not isinstance(model, EncoderWithHead) or (model.spec.per_token and model.spec.num_outputs != _SPAN):
        found = f"{type(model).__name__} has heads that no class of transformers has together"
        raise ConfigError(doing, found, "a model of classes, of spans, or of text", hint)
    kind = Kind.QUESTION_ANSWERING if model.spec.per_token else Kind.SEQUENCE_CLASSIFICATION
    try:
        plain = with_own_head(model, _config_of(model, read), kind, trust=trust)
    except ConfigError as error:
        raise ConfigError(doing, error.found, error.allowed, hint) from error
    return {
        "": plain
    }, "AutoModelForQuestionAnswering" if model.spec.per_token else "AutoModelForSequenceClassification"


def _config_of(model: EncoderWithHead, read: ModelInput) -> PreTrainedConfig:
    """Return the config of a model with the names of its classes."""
    config = copy.deepcopy(model.encoder.config)
    if model.spec.per_token:
        config.num_labels = model.spec.num_outputs  # some encoders were saved with the classes of another task
        return config
    names = read.labels or tuple(f"LABEL_{number}" for number in range(model.spec.num_outputs))
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    if model.classes is not None:
        config.problem_type = "multi_label_classification" if read.multi_label else "single_label_classification"
    elif read.context.data.is_regression:
        config.problem_type = "regression"
    return config


def _remarks(read: ModelInput, *, encoder_alone: bool) -> list[str]:
    """Return what dryfit does with scores, and a folder for plain transformers cannot say."""
    if encoder_alone or not read.fitted:
        return []
    numbers = ", ".join(f"{name} = {value:.6g}" for name, value in sorted(read.fitted.items()))
    return [f"the folder gives the same scores; dryfit decides by numbers fitted on validation: {numbers}"]


def _readme(read: ModelInput, loaded_by: str, *, types: bool) -> str:
    """Return how the folder is used: the same tokens give the same scores.

    Args:
        read: How rows were read.
        loaded_by: The class that loads the folder.
        types: Whether the model reads token types, which some tokenizers of transformers leave out if not asked.
    """
    further = ", return_token_type_ids=True" if types else ""
    columns, cut = ("text", "True") if read.criterion is None else ("criterion, text", '"only_second"')
    return f"""# A model for plain transformers

Written by `dryfit export`; it needs no dryfit. In this folder:

```python
from transformers import AutoTokenizer, {loaded_by}

tokenizer = AutoTokenizer.from_pretrained(".")
model = {loaded_by}.from_pretrained(".").eval()
```

Rows were read as `tokenizer({columns}, truncation={cut}, max_length={read.max_length}{further})`.
"""
