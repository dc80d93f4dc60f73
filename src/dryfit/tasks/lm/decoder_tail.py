"""The computation of a causal language model after its decoder stack, by its own code: head, softcap, scale.

The model's forward pass is run with its stack replaced by one that gives known features. So nothing is known here of
any architecture: whatever lies between the stack and the scores is computed as the model does it.

Dimension suffixes: ``B`` sequences, ``L`` tokens, ``C`` tokens of a chunk, ``H`` features, ``V`` words.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

FOREIGN: Final = (
    RuntimeError,
    NotImplementedError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
)
"""What a model's own code may raise where it asks for more than its stack's features."""

_TRIED: Final = 5
"""Tokens that a model is tried with."""

_CLOSE: Final = 2e-2
"""Share of the largest score that another shape may change by rounding in half precision."""


class _Features(BaseModelOutputWithPast):
    """A stack's output that has features, and None for all that some models give beside them."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def hidden_states(decoder: nn.Module, model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """Return the features that a model computes its scores from, (B, L, H); what follows sees no token.

    Args:
        decoder: The model, or PEFT's around it.
        model: The model itself.
        **inputs: Of its forward pass.
    """
    stack = model.base_model
    own: Callable[..., Any] = stack.forward
    found: list[torch.Tensor] = []

    def forward(*args: Any, **kwargs: Any) -> _Features:
        features_BLH: torch.Tensor = own(*args, **kwargs)[0]
        found.append(features_BLH)
        return _Features(last_hidden_state=features_BLH[:, :0])  # pyright: ignore[reportArgumentType]

    with _forward(stack, forward):
        decoder(**inputs, use_cache=False)
    return _once(found, model)


def scores_of(decoder: nn.Module, model: PreTrainedModel, hidden_CH: torch.Tensor) -> torch.Tensor:
    """Return the scores that a model computes from features, (C, V).

    Args:
        decoder: As in :func:`hidden_states`.
        model: As in :func:`hidden_states`.
        hidden_CH: (C, H).
    """
    stack = model.base_model
    given: list[torch.Tensor] = []

    def forward(*_args: Any, **_kwargs: Any) -> _Features:
        given.append(hidden_CH.unsqueeze(0))
        return _Features(last_hidden_state=given[-1])  # pyright: ignore[reportArgumentType]

    with _forward(stack, forward):
        scores_BCV: torch.Tensor = decoder(use_cache=False).logits
    _once(given, model)
    return scores_BCV.squeeze(0)


def cannot_chunk(decoder: nn.Module, model: PreTrainedModel) -> str | None:
    """Why a model's scores cannot be computed for some tokens alone, from its stack's features; None where they can.

    Nothing is computed from the model's weights but shapes, so that planning and training answer alike; whether the
    scores are the model's own, :func:`scores_differ` tries on its weights.

    Args:
        decoder: As in :func:`hidden_states`.
        model: As in :func:`hidden_states`.
    """
    name = model.config.model_type
    stack = model.base_model
    if stack is model:
        return f"{name} has no part that is called its base model"
    if any(isinstance(one, nn.Dropout) and one.p for one in _outside(model)):
        return f"the head of {name} has dropout"
    features_CH = _features(model)
    try:
        with torch.no_grad():
            scores_CV = scores_of(decoder, model, features_CH)
    except FOREIGN as error:
        return f"what {name} computes after its layers needs more than their output ({type(error).__name__})"
    if scores_CV.ndim != 2 or len(scores_CV) != len(features_CH):
        return f"{name} gives scores {tuple(scores_CV.shape)} for {len(features_CH)} tokens"
    return None


def head_alone(model: PreTrainedModel) -> bool:
    """Whether a model has no parameters outside its stack but those of its head, which has no adapter."""
    own = {id(one) for one in model.base_model.parameters()}
    head = model.get_output_embeddings()
    if head is not None:
        own |= {id(one) for one in head.parameters(recurse=False)}
    return all(id(one) in own for part in _outside(model) for one in part.parameters(recurse=False))


def scores_differ(decoder: nn.Module, model: PreTrainedModel) -> str | None:
    """Why a model's scores of some tokens alone are not those among others; None where they are, up to rounding.

    The test is made with the model's own weights, in training. Its layers are not run.

    Args:
        decoder: As in :func:`hidden_states`, with its weights.
        model: As in :func:`hidden_states`.
    """
    name = model.config.model_type
    features_CH = _features(model)
    draw = torch.Generator().manual_seed(0)
    features_CH.copy_(torch.randn(features_CH.shape, generator=draw))
    was_training = decoder.training
    decoder.train()
    with torch.no_grad():
        whole_CV, again_CV = (scores_of(decoder, model, features_CH).float() for _ in range(2))
        parts_CV = torch.cat([scores_of(decoder, model, rows).float() for rows in features_CH.split(3)])
    decoder.train(was_training)
    if not torch.equal(whole_CV, again_CV):
        return f"the scores of {name} are random"
    size, moved = float(whole_CV.abs().max()), float((whole_CV - parts_CV).abs().max())
    if not moved <= _CLOSE * size:
        return f"the scores of {name} depend on those beside them: they change by {moved:.2g} of {size:.2g}"
    return None


def _outside(model: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of a model that are not in its stack."""
    inside = set(model.base_model.modules())
    return [one for one in model.modules() if one not in inside]


def _features(model: PreTrainedModel) -> torch.Tensor:
    """Return room for some tokens' features, as the head takes them."""
    head = model.get_output_embeddings()
    weight = next((one for one in (head or model).parameters() if one.is_floating_point()), None)
    assert weight is not None
    size = _TRIED, model.config.get_text_config().hidden_size
    return torch.empty(size, dtype=weight.dtype, device=weight.device)


def _once(calls: list[torch.Tensor], model: PreTrainedModel) -> torch.Tensor:
    if len(calls) != 1:
        raise TypeError(f"{type(model).__name__} calls its base model {len(calls)} times")
    return calls[0]


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before: Any = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
