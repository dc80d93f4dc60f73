"""The task ``causal-lm``: each token from those before it. Its training step, for planning.

Dimension suffixes: ``B`` rows, ``L`` tokens, ``V`` words of the vocabulary.
"""

from typing import ClassVar, cast, final

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from peft import PeftModel
from transformers import PreTrainedModel

from dryfit.core.choices import BaseFormat, Precision
from dryfit.core.errors import ConfigError
from dryfit.core.settings import LoraSettings
from dryfit.meta.adapters import new_adapter
from dryfit.meta.construction import build
from dryfit.meta.pretrained import Kind
from dryfit.tasks.base import DTYPES, Batch, MakeBase, Outputs, TaskModel
from dryfit.tasks.encoder import EncoderTask

IGNORED = -100
"""Label of a token that is not learned: padding, or a prompt."""


@final
class CausalLm(TaskModel):
    """Scores of the next token; no cache of keys and values is kept.

    Args:
        decoder: A causal language model, with or without adapters.
    """

    def __init__(self, decoder: torch.nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def base(self) -> PreTrainedModel:
        """The language model without its adapters."""
        return cast(
            "PreTrainedModel", self.decoder.get_base_model() if isinstance(self.decoder, PeftModel) else self.decoder
        )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary after each token.

        Args:
            input_ids: (B, L).
            attention_mask: (B, L), 1 for tokens, 0 for padding.

        Returns:
            (B, L, V).
        """
        return self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


class CausalLmTask(EncoderTask):
    """Cross entropy of each token, given those before it."""

    kind: ClassVar[Kind] = Kind.CAUSAL_LM
    required: ClassVar[frozenset[str]] = frozenset()
    inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask")
    padded: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask", "labels")

    def model(self, make: MakeBase, *, seed: int = 0) -> CausalLm:
        """The language model, with adapters where they are asked for: frozen weights in their own number format."""
        del seed
        decoder, lora = make(self.given.settings.model, self.kind), self.given.settings.lora
        if lora.r == 0:
            return build(lambda: CausalLm(decoder))
        adapted = new_adapter(decoder, r=lora.r, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets)
        return build(lambda: CausalLm(_frozen_in(adapted, lora)))

    def batch_sizes(self, rows: int, length: int, *, segments: bool) -> dict[str, tuple[int, ...]]:
        """All of (rows, length): each token has a label."""
        del segments
        return dict.fromkeys(self.padded, (rows, length))

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Tokens that are learned: all but each row's first."""
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def loss_sum(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Summed over tokens, in fp32. Labels are shifted and not the scores: a shifted view would be copied."""
        assert isinstance(outputs, torch.Tensor)
        next_BL = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        scores = outputs.float().flatten(0, 1)
        return F.cross_entropy(scores, next_BL.flatten(), ignore_index=IGNORED, reduction="sum")


def _frozen_in(adapted: torch.nn.Module, lora: LoraSettings) -> torch.nn.Module:
    """Give the frozen weights their number format; adapters stay in fp32."""
    if lora.base is BaseFormat.INT8:
        raise ConfigError("planning adapters", "lora.base is int8", "fp32, fp16 or bf16")
    dtype = DTYPES[Precision(lora.base)]
    for parameter in adapted.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted
