"""Two encoders: the criterion's vectors are fused into the token vectors of the text, and two heads score them.

Dimension suffixes: ``B`` windows, ``L`` tokens of a window, ``K`` tokens of a criterion, ``D`` width of token
vectors of the text, ``C`` classes.
"""

import math
from collections.abc import Mapping
from typing import Final, final

import torch
from torch import nn
from transformers import PreTrainedModel

from dryfit.core.errors import ConfigError
from dryfit.core.settings.choices import Fusion, Weighting
from dryfit.core.settings.tables import JointSettings
from dryfit.tasks.heads import (
    EncoderModel,
    HeadSpec,
    encode,
    encoder_parts,
    mean_of_tokens,
    unneeded_outputs,
    width_of,
    without_autocast,
)
from dryfit.tasks.joint.two_heads import TwoHeads

CRITERION_IDS: Final = "criterion_ids"
CRITERION_MASK: Final = "criterion_mask"
CRITERIA_PART: Final = "criteria"
"""Subfolder of a saved model with the files of the criterion's encoder."""


@final
class CriterionFusion(nn.Module):
    """Fuses a criterion into each token vector of a text.

    ``add``, ``concat`` and ``gate`` take the mean of the criterion's token vectors, projected to the text's width where
    it differs: ``h + c``, ``W [h; c] + b``, and ``g * h + (1 - g) * c`` with ``g = sigmoid(W [h; c] + b)`` for each
    dimension (the gate of Arevalo et al. 2017, arXiv:1702.01992, equation 4). With ``attention`` each token of the text
    attends to the criterion's tokens, and the result is added to it (Vaswani et al. 2017, arXiv:1706.03762, section
    3.2.3; as many heads as the text's encoder has, if its width can be divided by them).

    Args:
        kind: Which fusion.
        text: The text's encoder.
        criteria: The criterion's encoder.
        dropout: Of attention probabilities.
    """

    def __init__(self, kind: Fusion, text: PreTrainedModel, criteria: PreTrainedModel, *, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        width, criteria_width = width_of(text), width_of(criteria)
        if kind is Fusion.ATTENTION:
            heads = math.gcd(width, text.config.num_attention_heads)
            self.attention = nn.MultiheadAttention(
                width, heads, dropout=dropout, kdim=criteria_width, vdim=criteria_width, batch_first=True
            )
            return
        self.project = nn.Identity() if width == criteria_width else nn.Linear(criteria_width, width)
        if kind is not Fusion.ADD:
            self.mix = nn.Linear(2 * width, width)

    def forward(
        self, hidden_BLD: torch.Tensor, criterion_BKD: torch.Tensor, criterion_mask_BK: torch.Tensor
    ) -> torch.Tensor:
        """Return the fused token vectors, (B, L, D).

        Args:
            hidden_BLD: Token vectors of the text.
            criterion_BKD: Token vectors of the criterion, of its encoder's width.
            criterion_mask_BK: 1 for tokens, 0 for padding.
        """
        if self.kind is Fusion.ATTENTION:
            padding_BK = criterion_mask_BK == 0
            attended_BLD, _ = self.attention(
                hidden_BLD, criterion_BKD, criterion_BKD, key_padding_mask=padding_BK, need_weights=False
            )
            return hidden_BLD + attended_BLD
        mean_BD = self.project(mean_of_tokens(criterion_BKD, criterion_mask_BK))
        mean_BLD = mean_BD.unsqueeze(1).expand_as(hidden_BLD)
        if self.kind is Fusion.ADD:
            return hidden_BLD + mean_BLD
        mixed_BLD = self.mix(torch.cat([hidden_BLD, mean_BLD], dim=-1))
        if self.kind is Fusion.CONCAT:
            return mixed_BLD
        gate_BLD = mixed_BLD.sigmoid()
        return gate_BLD * hidden_BLD + (1 - gate_BLD) * mean_BLD


@final
class TwoEncoders(EncoderModel):
    """An encoder of texts and one of criteria, fused, with two heads; all but the encoders runs in fp32.

    Args:
        encoder: Of texts.
        encoder_of_criteria: Of criteria; its first layers may be those of the other.
        joint: The ``[joint]`` table.
        spec: The shape of the head for classes.
        weighting: How the losses of the two heads are weighted.
        limits: As in :class:`~dryfit.tasks.base.TaskModel`.

    Raises:
        ConfigError: Layers are to be shared, and the encoders are of different models, or have no list of layers.
    """

    encoder_paths = ("encoder", "encoder_of_criteria")
    drawn = ("head.*", "fusion.*")

    def __init__(
        self,
        encoder: PreTrainedModel,
        encoder_of_criteria: PreTrainedModel,
        joint: JointSettings,
        spec: HeadSpec,
        weighting: Weighting,
        limits: Mapping[str, int],
    ) -> None:
        share_layers(encoder, encoder_of_criteria, joint)
        super().__init__(encoder)
        self.encoder_of_criteria = encoder_of_criteria
        self.fusion = CriterionFusion(joint.fusion, encoder, encoder_of_criteria, dropout=spec.settings.dropout)
        self.head = TwoHeads(width_of(encoder), spec, weighting)
        embedding = encoder_of_criteria.get_input_embeddings()
        assert isinstance(embedding.weight, torch.Tensor)
        self.limits = {**limits, CRITERION_IDS: len(embedding.weight)}
        self._unneeded_of_criteria = unneeded_outputs(encoder_of_criteria)

    def pretrained(self) -> Mapping[str, PreTrainedModel]:
        """Return both encoders."""
        return {"": self.encoder, CRITERIA_PART: self.encoder_of_criteria}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        criterion_ids: torch.Tensor,
        criterion_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Score windows; see :meth:`~dryfit.tasks.joint.two_heads.TwoHeads.forward`.

        Args:
            input_ids: Of the text, (B, L).
            attention_mask: (B, L), 1 for tokens, 0 for padding.
            criterion_ids: Of the criterion, (B, K).
            criterion_mask: (B, K), as the other.
            token_type_ids: Of the text, (B, L); left out for encoders without segments.
        """
        hidden_BLD = self.token_vectors(input_ids, attention_mask, token_type_ids)
        criterion = {"input_ids": criterion_ids, "attention_mask": criterion_mask}
        criterion_BKD = encode(self.encoder_of_criteria, {**criterion, **self._unneeded_of_criteria})
        with without_autocast(hidden_BLD.device):
            dtype = self.head.dtype
            fused_BLD = self.fusion(hidden_BLD.to(dtype), criterion_BKD.to(dtype), criterion_mask)
            return self.head(fused_BLD, attention_mask)


def share_layers(first: PreTrainedModel, second: PreTrainedModel, joint: JointSettings) -> None:
    """Share the embeddings and first layers of one encoder with another: the same parameters, not copies.

    Args:
        first: Stays as it is.
        second: An encoder of the same model; changed in place.
        joint: Its ``share_ratio`` of the layers, rounded, is shared; at 0 not even the embeddings are.

    Raises:
        ConfigError: The encoders are of different models, or have no list of layers.
    """
    if joint.share_ratio == 0:
        return
    doing = f"sharing layers between two encoders (joint.share_ratio = {joint.share_ratio:g})"
    if joint.criteria_model is not None:
        raise ConfigError(
            doing,
            f"the criterion's encoder is {joint.criteria_model}",
            allowed="joint.criteria_model unset: both encoders are then of one model",
            hint="leave out joint.criteria_model, or joint.share_ratio",
        )
    try:
        parts = encoder_parts(first)
    except ConfigError as error:
        raise ConfigError(doing, error.found, allowed="joint.share_ratio = 0 for this model") from error
    count = round(joint.share_ratio * parts.depth)
    for name, parameter in list(first.named_parameters()):
        if parts.depth_of[name] <= count:
            owner, _, key = name.rpartition(".")
            second.get_submodule(owner).register_parameter(key, parameter)
