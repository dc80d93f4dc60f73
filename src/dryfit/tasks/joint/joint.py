"""The task ``joint``: a class and a span, from one encoder that reads the criterion and one that reads the text.

Windows hold the text alone. The criterion comes in by the fusion, so that no window is shorter for a long criterion.

Dimension suffixes: ``B`` windows of a batch, ``R`` rows, ``K`` tokens of a criterion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final, final

import torch
from transformers import PreTrainedTokenizerBase

from dryfit.core.errors import ConfigError
from dryfit.core.settings.tables import ModelSettings, TrialSettings
from dryfit.meta.construction.construction import build
from dryfit.meta.files.source import model_identity
from dryfit.meta.loading.configs import load_tokenizer, most_tokens
from dryfit.meta.loading.pretrained import pretrained_config
from dryfit.tasks.base import MODEL_INPUTS, Batch, MakeBase, TaskModel
from dryfit.tasks.joint.class_and_span import ClassAndSpanTask
from dryfit.tasks.joint.two_encoders import CRITERIA_PART, CRITERION_IDS, CRITERION_MASK, TwoEncoders
from dryfit.tasks.rows.checked_rows import Readable, Row, Splits, UnlabelledRow
from dryfit.tasks.tokens.token_set import Tokens, TokenSet
from dryfit.tasks.tokens.windows import Windows

_LENGTHS: Final = "criterion_lengths"


@final
class JointTask(ClassAndSpanTask):
    """A class and a span of each row, from two encoders."""

    required: ClassVar[frozenset[str]] = frozenset({"label", "evidence", "criterion"})
    inputs: ClassVar[tuple[str, ...]] = (*MODEL_INPUTS, CRITERION_IDS, CRITERION_MASK)

    @property
    def shared_tokens(self) -> None:
        """None: criteria are in no window."""
        return None

    def sources(self) -> Mapping[str, ModelSettings]:
        """Return the model that reads texts and the one that reads criteria."""
        settings = self.context.settings
        return {"": settings.model, CRITERIA_PART: criteria_source(settings)}

    def token_key(self) -> str:
        """Return what windows, classes and the criterion's own tokens depend on."""
        settings = self.context.settings
        criteria = f"{model_identity(criteria_source(settings))}-{settings.joint.criterion_length}"
        return f"{super().token_key()}-alone-{criteria}"

    def tokenise(self, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Cut all texts into windows, with the tokens of each row's criterion beside them.

        Raises:
            ConfigError: The criterion's model has too few positions, or its tokenizer has no padding token.
        """
        self._check_length()
        criteria = self._criteria_tokenizer()
        alone = {name: tuple(replace(row, criterion=None) for row in rows) for name, rows in splits.items()}
        tokens = super().tokenise(alone, tokenizer)
        sets = {name: self._with_criteria(split, splits[name], criteria) for name, split in tokens.splits.items()}
        return replace(tokens, splits=sets, pairs=True)

    def tokenise_unlabelled(self, rows: Sequence[Readable], tokenizer: PreTrainedTokenizerBase) -> TokenSet:
        """Cut texts into windows, with the tokens of each row's criterion beside them."""
        alone = [UnlabelledRow(id=None, text=row.text, criterion=None, place="") for row in rows]
        split = super().tokenise_unlabelled(alone, tokenizer)
        return self._with_criteria(split, rows, self._criteria_tokenizer())

    def model(self, make: MakeBase, *, seed: int = 0) -> TaskModel:
        """Return both encoders with their fusion and two heads."""
        settings = self.context.settings
        encoder = make(settings.model, self.kind)
        criteria = make(criteria_source(settings), self.kind, part=CRITERIA_PART)
        weighting = settings.multitask.weighting
        return build(
            lambda: TwoEncoders(encoder, criteria, settings.joint, self.head, weighting, self.limits), seed=seed
        )

    def collate_unlabelled(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Pad some windows and the criteria of their rows."""
        sources_B = Windows(tokens).rows_W[list(rows)]
        lengths_B = tokens.extra[_LENGTHS][sources_B]
        places_K = torch.arange(int(lengths_B.max()))
        return super().collate_unlabelled(tokens, rows) | {
            CRITERION_IDS: tokens.extra[CRITERION_IDS][sources_B, : len(places_K)].long(),
            CRITERION_MASK: (places_K < lengths_B[:, None]).long(),
        }

    def batch_sizes(self, rows: int, length: int, *, segments: bool) -> dict[str, tuple[int, ...]]:
        """Return the sizes for one encoder, with criteria of the greatest length."""
        criterion = dict.fromkeys((CRITERION_IDS, CRITERION_MASK), (rows, self.context.settings.joint.criterion_length))
        return super().batch_sizes(rows, length, segments=segments) | criterion

    def _criteria_tokenizer(self) -> PreTrainedTokenizerBase:
        saved = self.context.saved
        if saved is None:
            return load_tokenizer(criteria_source(self.context.settings))
        return load_tokenizer(replace(saved, name=f"{saved.name}/{CRITERIA_PART}"))

    def _with_criteria(
        self, split: TokenSet, rows: Sequence[Row | Readable], tokenizer: PreTrainedTokenizerBase
    ) -> TokenSet:
        """Add the tokens of each row's criterion to its windows: padded ids (R, K), and their number (R,)."""
        pad_id, length = tokenizer.pad_token_id, self.context.settings.joint.criterion_length
        if not isinstance(pad_id, int):
            raise ConfigError(
                "tokenising the criteria",
                "the tokenizer has no padding token",
                allowed="an encoder's tokenizer for joint.criteria_model",
            )
        texts = [row.criterion or "" for row in rows]
        distinct = list(dict.fromkeys(texts))
        encoded = tokenizer(distinct, truncation=True, max_length=length, return_attention_mask=False)["input_ids"]
        table = torch.full((len(distinct), length), pad_id, dtype=torch.int32)
        for index, ids in enumerate(encoded):
            table[index, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        numbers = {text: index for index, text in enumerate(distinct)}
        picked_R = torch.tensor([numbers[text] for text in texts])
        lengths_R = torch.tensor([len(ids) for ids in encoded])[picked_R]
        return replace(split, extra={**split.extra, CRITERION_IDS: table[picked_R], _LENGTHS: lengths_R})

    def _check_length(self) -> None:
        source, length = criteria_source(self.context.settings), self.context.settings.joint.criterion_length
        limit = most_tokens(pretrained_config(source, self.kind))
        if limit is not None and length > limit:
            raise ConfigError(
                f"preparing the model {source.name}",
                f"joint.criterion_length is {length}",
                allowed=f"at most {limit}: the model has no more positions",
            )


def criteria_source(settings: TrialSettings) -> ModelSettings:
    """Return the model that reads criteria; ``model.revision`` is of the one that reads texts."""
    name = settings.joint.criteria_model
    if name is None:
        return settings.model
    return ModelSettings(name=name, trust_remote_code=settings.model.trust_remote_code)
