"""An encoder with a head on its pooled token vectors, or on each of them.

Dimension suffixes: ``B`` rows, ``L`` tokens, ``D`` encoder width, ``C`` scores.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import nn
from transformers import PreTrainedModel

from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import HeadSettings
from dryfit.tasks.base import TaskModel

_ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU}


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The shape of a head: all that is needed to build it again.

    Attributes:
        settings: The ``[head]`` table.
        num_outputs: Scores per row.
        cls_last: The classification token is each row's last one.
        multi_label: Probabilities are sigmoids of the scores, not a softmax.
        per_token: Each token is scored, and nothing is pooled.
    """

    settings: HeadSettings
    num_outputs: int
    cls_last: bool = False
    multi_label: bool = False
    per_token: bool = False


@final
class AttentionPooling(nn.Module):
    """A mean of token vectors with learned weights: ``softmax(v . tanh(W h + b))`` over the tokens of a row.

    Additive attention with one query (Yang et al. 2016, "Hierarchical Attention Networks for Document Classification",
    equations 5 to 7).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.query = nn.Linear(width, 1, bias=False)

    def forward(self, tokens: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the pooled rows, (B, D).

        Args:
            tokens: Their vectors (B, L, D), and the mask (B, L). One argument: it is the first step of a head.

        Returns:
            (B, D).
        """
        hidden_BLD, mask_BL = tokens
        scores_BL = self.query(torch.tanh(self.project(hidden_BLD))).squeeze(-1)
        scores_BL = scores_BL.masked_fill(mask_BL == 0, torch.finfo(scores_BL.dtype).min)
        return (hidden_BLD * scores_BL.softmax(dim=1).unsqueeze(-1)).sum(dim=1)


class EncoderModel(TaskModel):
    """A model whose texts are read by one encoder. A subclass adds heads, and a ``forward`` that scores."""

    encoder_paths = ("encoder",)

    def __init__(self, encoder: PreTrainedModel) -> None:
        super().__init__()
        self.encoder = encoder
        self.takes_types = takes_types(encoder)
        self._unneeded = unneeded_outputs(encoder)

    def base(self) -> PreTrainedModel:
        """Return the encoder of texts."""
        return self.encoder

    def token_vectors(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the encoder's last hidden states, (B, L, D), in its own dtype."""
        types_BL = token_type_ids if self.takes_types else None
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": types_BL}
        return encode(self.encoder, {**inputs, **self._unneeded})


class EncoderWithHead(EncoderModel):
    """Scores of each row, or of each of its tokens, from an encoder's last hidden states.

    Pooling sees no padding. The head runs in fp32 whatever the encoder's precision: its few operations cost nothing
    there, and small score differences survive.
    """

    def __init__(self, encoder: PreTrainedModel, spec: HeadSpec, *, classes: int | None = None) -> None:
        super().__init__(encoder)
        self.spec = spec
        self.classes = classes
        self.head = make_head(width_of(encoder), spec)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Score rows.

        Args:
            input_ids: (B, L).
            attention_mask: (B, L), 1 for tokens, 0 for padding.
            token_type_ids: (B, L); left out for encoders without segments.

        Returns:
            (B, C), or (B, L, C) with ``per_token``, in the head's own dtype.
        """
        hidden_BLD = self.token_vectors(input_ids, attention_mask, token_type_ids)
        with without_autocast(hidden_BLD.device):
            return self.head(pooled(hidden_BLD.to(dtype_of(self.head)), attention_mask, self.spec))


def encode(encoder: PreTrainedModel, inputs: Mapping[str, torch.Tensor | bool | None]) -> torch.Tensor:
    """Return an encoder's last hidden states, (B, L, D), in its own dtype.

    Args:
        encoder: The encoder.
        inputs: Its arguments, with those of :func:`unneeded_outputs`; None is left out.
    """
    return encoder(**{name: value for name, value in inputs.items() if value is not None})[0]


def pooled(
    hidden_BLD: torch.Tensor, mask_BL: torch.Tensor, spec: HeadSpec
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return a head's input: one vector for each row, without padding, or all vectors where the head itself pools.

    Args:
        hidden_BLD: Token vectors.
        mask_BL: 1 for tokens, 0 for padding.
        spec: The head's.
    """
    if spec.per_token:
        return hidden_BLD
    match spec.settings.pooling:
        case "cls":
            if not spec.cls_last:
                return hidden_BLD[:, 0]
            last_B = mask_BL.sum(dim=1) - 1
            return hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B]
        case "mean":
            return mean_of_tokens(hidden_BLD, mask_BL)
        case "max":
            lowest = torch.finfo(hidden_BLD.dtype).min
            return hidden_BLD.masked_fill(mask_BL.unsqueeze(-1) == 0, lowest).amax(dim=1)
        case "attention":
            return hidden_BLD, mask_BL


def mean_of_tokens(hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row's token vectors without padding, (B, D)."""
    weights_BL1 = mask_BL.unsqueeze(-1).to(hidden_BLD.dtype)
    return (hidden_BLD * weights_BL1).sum(dim=1) / weights_BL1.sum(dim=1)


# Parameters that stand after the list of layers and belong before its end: the norm of DeBERTa's relative embeddings,
# which every layer reads, and the convolution that is added to its first layer.
_PLACED = {"deberta-v2": {"encoder.LayerNorm.": 0, "encoder.conv.": 1}}


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """The layers of an encoder, for settings that depend on depth.

    Attributes:
        depth: Number of layers.
        depth_of: Depth of each parameter by its name in the encoder: 0 embeddings, 1 the first layer, ``depth`` the
            last one and all that follows it.
        path: Name of the list of layers in the encoder.
    """

    depth: int
    depth_of: dict[str, int]
    path: str


def encoder_parts(encoder: PreTrainedModel) -> EncoderParts:
    """Find an encoder's layers.

    Raises:
        ConfigError: It has no list of separate layers (ALBERT shares one).
    """
    depth = encoder.config.num_hidden_layers
    path = next(
        (
            name
            for name, module in encoder.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == depth
        ),
        None,
    )
    if path is None or getattr(encoder.config, "num_hidden_groups", depth) != depth:
        raise ConfigError(
            "looking for the layers of the encoder",
            f"{encoder.config.model_type} has no list of {depth} layers of their own",
            allowed="regularization.freeze_layers = 0 and optim.layer_decay = 1 for this model",
        )
    depth_of: dict[str, int] = {}
    placed = _PLACED.get(encoder.config.model_type, {})
    passed = False
    for name, _ in encoder.named_parameters():
        known = next((place for prefix, place in placed.items() if name.startswith(prefix)), None)
        if known is not None:
            depth_of[name] = known
        elif name.startswith(f"{path}."):
            passed = True
            depth_of[name] = int(name.removeprefix(f"{path}.").split(".")[0]) + 1
        else:
            depth_of[name] = depth if passed and "embed" not in name else 0
    return EncoderParts(depth, depth_of, path)


def freeze(model: TaskModel, layers: int, *, dropout: bool = True) -> None:
    """Freeze the embeddings and the first layers of each encoder; 0 freezes nothing.

    Args:
        model: Changed in place.
        layers: How many of each encoder.
        dropout: Whether frozen modules drop out values in training. False: they stay in eval mode, so that what they
            compute is a function of the row alone.

    Raises:
        ConfigError: An encoder has fewer layers.
    """
    for path in model.encoder_paths if layers else ():
        encoder = cast("PreTrainedModel", model.get_submodule(path))
        parts = encoder_parts(encoder)
        if layers > parts.depth:
            raise ConfigError(
                f"freezing the first {layers} layers",
                f"the encoder has {parts.depth}",
                allowed=f"regularization.freeze_layers from 0 to {parts.depth}",
            )
        for name, parameter in encoder.named_parameters():
            if parts.depth_of[name] <= layers and not _follows_layers(name, parts):
                parameter.requires_grad_(False)
        if not dropout:
            model.still += tuple(_wholly_frozen(encoder, path))
            model.train(model.training)


def _wholly_frozen(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the largest modules, by their paths, that have weights, all of them frozen."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        yield path
        return
    for name, child in module.named_children():
        yield from _wholly_frozen(child, f"{path}.{name}")


def _follows_layers(name: str, parts: EncoderParts) -> bool:
    """Return whether a parameter comes after the layers (a final norm), and so is never frozen."""
    in_layer = any(part.isdigit() for part in name.split("."))
    return parts.depth_of[name] == parts.depth and not in_layer


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a context without autocast, which knows no meta device."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


def dtype_of(head: nn.Module) -> torch.dtype:
    """Return the dtype of a head's weights."""
    return next(head.parameters()).dtype


def width_of(encoder: PreTrainedModel) -> int:
    """Return the width of an encoder's token vectors."""
    return encoder.config.hidden_size


def takes_types(encoder: PreTrainedModel) -> bool:
    """Return whether an encoder reads token types (segments)."""
    takes = "token_type_ids" in inspect.signature(encoder.forward).parameters
    return takes and getattr(encoder.config, "type_vocab_size", 2) > 1


def unneeded_outputs(encoder: PreTrainedModel) -> dict[str, bool]:
    """Return arguments that keep an encoder from returning, and so from holding, what no head reads.

    They are passed with each call; the config stays as it is, since it is saved with the model.
    """
    parameters = inspect.signature(encoder.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {
        name: False
        for name in ("use_cache", "output_hidden_states", "output_attentions")
        if name in parameters or (takes_any and getattr(encoder.config, name, False))
    }


def make_head(width: int, spec: HeadSpec) -> nn.Sequential:
    """Make a head on token vectors of a width; its input is what :func:`pooled` returns."""
    settings = spec.settings
    pools = not spec.per_token and settings.pooling == "attention"
    steps: list[nn.Module] = [AttentionPooling(width)] if pools else []
    for _ in range(settings.layers):
        steps += [nn.Dropout(settings.dropout), nn.Linear(width, settings.hidden), _ACTIVATIONS[settings.activation]()]
        width = settings.hidden
    steps += [nn.Dropout(settings.dropout), nn.Linear(width, spec.num_outputs)]
    return nn.Sequential(*steps)
