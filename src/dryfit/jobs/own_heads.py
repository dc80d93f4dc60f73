"""Say a head of ours with the head that an architecture has in transformers, or find out that it cannot be said.

Nothing is taken from a table of architectures: the linear layers of its own head are those that run and that an encoder
does not have, and what they compute is compared with what a head of ours with the same weights computes, in fp64.

Dimension suffixes: ``B`` rows, ``L`` tokens, ``D`` encoder width, ``C`` scores.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Final, get_args

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from dryfit.core.errors import ConfigError
from dryfit.core.settings.tables import HeadSettings
from dryfit.meta.loading.configs import most_tokens
from dryfit.meta.loading.pretrained import Kind, make_model
from dryfit.tasks.base import Batch
from dryfit.tasks.heads import EncoderWithHead, HeadSpec, make_head, pooled, width_of

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
