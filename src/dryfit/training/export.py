"""Saved models in other forms: merged with adapters, or for plain transformers."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from dryfit.meta.configs import most_tokens
from dryfit.meta.pretrained import DTYPES, Kind, make_model
from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import base_format
from dryfit.settings.files import publishing
from dryfit.settings.tables import HeadSettings
from dryfit.settings.training_messages import ExportRequest, ExportResult, MergeRequest, MergeResult
from dryfit.settings.wire import Note, Phase
from dryfit.tasks.base import Batch, TaskModel
from dryfit.tasks.causal_lm import CausalLm
from dryfit.tasks.heads import EncoderModel, EncoderWithHead, HeadSpec, make_head, pooled, width_of
from dryfit.tasks.saved_models import ModelInput, copy_tokenizer, load, read_model_input
from dryfit.training.model_card import README_FILE

# Say a head of ours with the head that an architecture has in transformers, or find out that it cannot be said.
#
# Nothing is taken from a table of architectures: the linear layers of its own head are those that run and that an
# encoder does not have, and what they compute is compared with what a head of ours with the same weights computes, in
# fp64.
#
# Dimension suffixes: ``B`` rows, ``L`` tokens, ``D`` encoder width, ``C`` scores.


_POOLINGS: Final = ("cls", "mean", "max")
_ACTIVATIONS: Final = get_args(HeadSettings.model_fields["activation"].annotation)
_ROWS, _TOKENS, _PADDING = 3, 12, 5
_WITHIN: Final = 1e-9
"""How far two computations of the same fp64 scores may lie apart, relative to the largest of them."""


@dataclass(frozen=True, slots=True)
class OwnHead:
    """An architecture's model with its own head, and what of it is a head.

    Attributes:
        model: With the encoder's weights, in fp64.
        linears: The linear layers of the head, in the order they run.
        others: Names of other weights that an encoder does not have, a norm's say.
    """

    model: PreTrainedModel
    linears: tuple[nn.Linear, ...]
    others: tuple[str, ...]


def with_own_head(ours: EncoderWithHead, config: PreTrainedConfig, kind: Kind, *, trust: bool) -> PreTrainedModel:
    """Return the architecture's own model, in fp32, whose scores are ours; tried on random tokens, in fp64.

    Args:
        ours: The trained model; it comes back in fp64.
        config: Its encoder's, with the classes as they are to be saved.
        kind: The architecture's head: of a row's classes, or of a span.
        trust: Run code that comes with the model.

    Raises:
        ConfigError: The architecture has no such head, or one that computes something else.
    """
    spec = ours.spec
    doing = f"giving a {config.model_type} model its own head"
    plain = make_model(_adapted_to(config, spec.settings), kind, trust_remote_code=trust)
    ours.double().eval()
    own = _own_head(plain.double().eval(), ours, doing)
    batch = _random_batch(ours)
    said = {_as_text(settings, spec) for settings in _sayable(own, ours, batch)}
    name = type(plain).__name__
    if _as_text(spec.settings, spec) not in said:
        also = f"; its head also has {', '.join(own.others)}" if own.others else ""
        raise ConfigError(
            doing,
            f"the model has {_as_text(spec.settings, spec)}, which {name} does not compute{also}",
            " or ".join(sorted(said)) or f"nothing that [head] can say is what {name} computes",
        )
    _give(own.linears, ours.head)
    with torch.no_grad():
        have, want = _scores(own.model, batch), ours(**batch)
    if not _equal(have, want):
        raise ConfigError(doing, f"the scores of {name} differ by {(have - want).abs().max():.1e}", "the same scores")
    return plain.float()


def _adapted_to(config: PreTrainedConfig, settings: HeadSettings) -> PreTrainedConfig:
    """Return a config whose head is like ours, where the architecture lets a config say so."""
    adapted = copy.deepcopy(config)
    for key, value in {
        "classifier_pooling": settings.pooling if settings.pooling in ("cls", "mean") else None,
        "pooler_hidden_act": settings.activation,
        "classifier_activation": settings.activation,
    }.items():
        if value is not None and hasattr(adapted, key):
            setattr(adapted, key, value)
    return adapted


def _own_head(plain: PreTrainedModel, ours: EncoderWithHead, doing: str) -> OwnHead:
    """Fill an architecture's model with our encoder, and find its head: what runs, and was not filled.

    Raises:
        ConfigError: Its encoder is another one.
    """
    base = plain.base_model
    name = type(plain).__name__
    found = base.load_state_dict(ours.encoder.state_dict(), strict=False) if base is not plain else None
    if found is None or found.unexpected_keys:
        raise ConfigError(doing, f"{name} does not have the encoder of {type(ours.encoder).__name__} in it")
    filled = {id(value) for key, value in base.named_parameters() if key not in set(found.missing_keys)}
    new = [module for module in plain.modules() if isinstance(module, nn.Linear) and id(module.weight) not in filled]
    running: list[nn.Linear] = []

    def note(module: nn.Module, _: object) -> None:
        assert isinstance(module, nn.Linear)
        running.append(module)

    hooks = [module.register_forward_pre_hook(note) for module in new]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in (value for module in new for value in module.parameters()):
            drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            value.copy_(drawn / value.shape[-1] ** 0.5)  # neither so small nor so large that activations are alike
        _scores(plain, _random_batch(ours))
    for hook in hooks:
        hook.remove()
    head = {id(value) for module in running for value in module.parameters()}
    others = (key for key, value in plain.named_parameters() if id(value) not in filled | head)
    return OwnHead(plain, tuple(running), tuple(others))


def _sayable(own: OwnHead, ours: EncoderWithHead, batch: Batch) -> Iterator[HeadSettings]:
    """Yield the heads of ours that compute what an architecture's own head does, with the weights that it has now."""
    shapes = [(layer.in_features, layer.out_features) for layer in own.linears]
    width, wanted = width_of(ours.encoder), ours.spec.num_outputs
    hidden = {out for _, out in shapes[:-1]}
    chained = [width, *(out for _, out in shapes)]
    if (
        not shapes
        or len(hidden) > 1
        or shapes != list(pairwise(chained))
        or shapes[-1][1] != wanted
        or any(layer.bias is None for layer in own.linears)
    ):
        return
    with torch.no_grad():
        want = _scores(own.model, batch)
        hidden_BLD = ours.token_vectors(batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids"))
        poolings = (ours.spec.settings.pooling,) if ours.spec.per_token else _POOLINGS
        for pooling, activation in product(poolings, _ACTIVATIONS if hidden else _ACTIVATIONS[:1]):
            known = {"pooling": pooling, "activation": activation, "layers": len(shapes) - 1, "dropout": 0.0}
            settings = HeadSettings.model_validate({**known, **({"hidden": hidden.copy().pop()} if hidden else {})})
            spec = replace(ours.spec, settings=settings)
            head = make_head(width, spec).double().eval()
            for layer, theirs in zip(_linears(head), own.linears, strict=True):
                layer.load_state_dict(theirs.state_dict())
            if _equal(head(pooled(hidden_BLD, batch["attention_mask"], spec)), want):
                yield settings


def _give(theirs: Sequence[nn.Linear], head: nn.Module) -> None:
    """Copy the weights of our head into an architecture's own."""
    for layer, our in zip(theirs, _linears(head), strict=True):
        layer.load_state_dict(our.state_dict())


def _linears(head: nn.Module) -> list[nn.Linear]:
    return [module for module in head.modules() if isinstance(module, nn.Linear)]


def _as_text(settings: HeadSettings, spec: HeadSpec) -> str:
    """Return what matters of a head: two heads with the same text compute the same with the same weights."""
    pooling = "" if spec.per_token else f"pooling = {settings.pooling}, "
    layers = f", hidden = {settings.hidden}, activation = {settings.activation}" if settings.layers else ""
    return f"head.{pooling}layers = {settings.layers}{layers}"


def _random_batch(ours: EncoderWithHead) -> Batch:
    """Return random tokens of rows of several lengths; always the same."""
    config: Any = ours.encoder.config
    generator = torch.Generator().manual_seed(1)
    tokens = min(_TOKENS, most_tokens(config) or _TOKENS)
    ids_BL = torch.randint(0, config.vocab_size, (_ROWS, tokens), generator=generator)
    mask_BL = torch.ones_like(ids_BL)
    mask_BL[-1, tokens - min(_PADDING, tokens - 1) :] = 0
    pad = config.pad_token_id
    if isinstance(pad, int):  # some architectures count positions by it
        ids_BL = torch.where(ids_BL == pad, (ids_BL + 1) % config.vocab_size, ids_BL).where(mask_BL == 1, pad)
    batch = {"input_ids": ids_BL, "attention_mask": mask_BL}
    if ours.takes_types:
        batch["token_type_ids"] = torch.randint(0, 2, ids_BL.shape, generator=generator) * mask_BL
    return batch


def _scores(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the scores of an architecture's own model: (B, C), or of starts and ends (B, L, 2)."""
    said: Any = model(**batch)
    return torch.stack((said.start_logits, said.end_logits), dim=-1) if "start_logits" in said else said.logits


def _equal(have: torch.Tensor, want: torch.Tensor) -> bool:
    return have.shape == want.shape and bool((have - want).abs().max() <= _WITHIN * want.abs().max().clamp(min=1.0))


# Child job MERGE: save a base model and its adapters as one model, which needs neither dryfit nor PEFT.


def merge(body: MergeRequest, channel: ChildChannel) -> MergeResult:
    """Merge a saved model's adapters into its base, in fp32, and save it in the format its base had.

    Where the base was quantised, they are merged into the matrices that its layers computed with, as in training, and
    saved in the format it computed in.

    Raises:
        LoadError: The folder is not one that dryfit saved, or the base is no longer where it was.
        ConfigError: The folder holds no adapters.
    """
    torch.set_num_threads(body.threads)
    folder, target = Path(body.model_dir), Path(body.out)
    model = load(folder, dtype=torch.float32, trust=body.trust)
    if not isinstance(model, TaskModel) or model.adapted() is None:
        raise ConfigError(f"merging the adapters of {folder}", "it holds none", "a model with LoRA adapters")
    channel.beat()
    whole = merged(model, read_model_input(folder))
    channel.send(Phase(name="save"))
    with publishing(target) as temporary:
        whole.save_pretrained(temporary)
        copy_tokenizer(folder, temporary)
    size = sum(path.stat().st_size for path in target.iterdir())
    return MergeResult(out=str(target), size_bytes=size)


def merged(model: TaskModel, read: ModelInput) -> PreTrainedModel:
    """Return a model's base with its adapters merged into it, in the format that the base had in training.

    Args:
        model: With adapters, in fp32; it is changed.
        read: What is known of its training.
    """
    adapted: Any = model.adapted()
    whole: Any = adapted.merge_and_unload(safe_merge=True)
    return whole.to(DTYPES[base_format(read.settings.lora, read.settings.train).compute])


# Child job EXPORT: save a trained model for plain transformers, with the same scores, or say why that cannot be.


_ENCODER = "transformers-encoder"
_SPAN = 2


def export(body: ExportRequest, channel: ChildChannel) -> ExportResult:
    """Save a model for plain transformers; the folder appears by one rename, when it is complete.

    Raises:
        LoadError: The folder is not one that dryfit saved.
        ConfigError: The model cannot be said in the classes of transformers; what of it can is said.
    """
    torch.set_num_threads(body.threads)
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
    for note in _remarks(read, encoder_alone=body.encoder_alone):
        channel.send(Note(text=note))
    with publishing(target) as temporary:
        for part, plain in parts.items():
            plain.save_pretrained(temporary / part)
            copy_tokenizer(folder / part, temporary / part)
        readme = _readme(read, loaded_by, types=model.takes_types)
        (temporary / README_FILE).write_text(readme, encoding="utf-8")
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
