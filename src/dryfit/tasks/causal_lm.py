"""The task ``causal-lm``: next-token prediction, of a text or of the answer to a prompt.

Dimension suffixes: ``B`` sequences, ``L`` tokens, ``V`` words of the vocabulary, ``N`` tokens of all sequences, ``R``
rows of a split.

Whether a decoder keeps examples apart that share a sequence, as packing asks, is tried.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, cast, final

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dryfit.meta.adapters import new_adapter
from dryfit.meta.configs import load_tokenizer
from dryfit.meta.construction import build
from dryfit.meta.pretrained import Kind
from dryfit.settings.choices import Metric
from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.execution import base_format, check_precision
from dryfit.settings.wire import canonical_json
from dryfit.tasks.base import Batch, MakeBase, Measured, Outputs, TaskContext, TaskModel
from dryfit.tasks.baselines import Baseline, Quiz, answer_baselines, token_baselines
from dryfit.tasks.encoder import EncoderTask
from dryfit.tasks.generation import PROMPTS_AT_ONCE, Asked, answer, answer_metric, asked_of, measured, rehearse, sampled
from dryfit.tasks.lm_loss import (
    IGNORED,
    INPUTS,
    PADDED,
    ChunkLosses,
    TokenLoss,
    chunk_tokens,
    chunked_losses,
    entries,
    hidden_states,
    labelled,
    over_all_words,
    scores_of,
    whole_token_loss,
)
from dryfit.tasks.prompts import PromptPart, PromptTokenizer, answer_words, exchanges, parts_of, questions, sequences
from dryfit.tasks.rows import TRAIN, VALIDATION, Readable, Splits, UnlabelledRow
from dryfit.tasks.scored_rows import LOSS_TERMS, ScoredRow
from dryfit.tasks.tokens import Tokens, TokenSet, pack

_SAME: Final = 1e-6
"""Share of the largest score that masked tokens may change: only rounding, since their weights are zero."""

_CLOSE: Final = 2e-2
"""Share of the largest score that other shapes may change by rounding in half precision."""


def check_packing(model: TaskModel) -> None:
    """Refuse packing for a decoder in which one example would change another's scores.

    The decoder is tried: a second example is scored behind two different first ones, and alone. The test holds for any
    weights, and whatever the cause.

    Raises:
        ConfigError: The second example's scores are not its own.
    """
    doing, allowed = "checking lm.packing = true", "lm.packing = false for this model"
    config = model.base().config
    name = config.model_type
    if "position_ids" not in inspect.signature(model.base().forward).parameters:
        raise ConfigError(doing, f"{name} takes no positions", allowed)
    device = next(model.parameters()).device
    ids_BL = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 8, 9, 10]], device=device) % config.vocab_size
    positions_BL = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device).expand(2, -1)
    mask_BL = torch.ones_like(ids_BL)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        packed_BLV = model(ids_BL, mask_BL, positions_BL)[:, 3:].float()
        alone_LV = model(ids_BL[:1, 3:], mask_BL[:1, 3:])[0].float()
    model.train(was_training)
    size = float(alone_LV.abs().max())
    seen = float((packed_BLV[0] - packed_BLV[1]).abs().max())
    moved = float((packed_BLV[0] - alone_LV).abs().max())
    if not (seen <= _SAME * size and moved <= _CLOSE * size):
        problem = f"examples in one sequence see each other in {name}: scores change by {max(seen, moved):.2g}"
        raise ConfigError(doing, f"{problem} of {size:.2g}", allowed)


_PACK_SEED = 0
_ADAPTERS = ("*lora_*",)


@final
class CausalLm(TaskModel):
    """Scores of the next token, without a cache of keys and values.

    Args:
        decoder: A causal language model, or PEFT's model around one.

    Attributes:
        chunk_losses: How the losses of some tokens are computed, given labels.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.chunk_losses: ChunkLosses = over_all_words
        self.drawn = _ADAPTERS if self.has_adapters else ()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained on frozen weights."""
        return hasattr(self.decoder, "peft_config")

    def base(self) -> PreTrainedModel:
        """Return the language model without the wrapper of its adapters."""
        decoder: Any = self.decoder
        return cast("PreTrainedModel", decoder.get_base_model() if self.has_adapters else decoder)

    def adapted(self) -> nn.Module | None:
        """Return PEFT's model, of which only adapters are saved; None without adapters."""
        return self.decoder if self.has_adapters else None

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Score the vocabulary after each token; given labels, compute losses without the scores of all tokens.

        Args:
            input_ids: (B, L).
            attention_mask: (B, L), 1 for tokens, 0 for padding.
            position_ids: (B, L), of sequences with several examples: each begins at 0, and so does the padding.
                transformers then keeps examples from seeing each other, if no mask is given.
            labels: (B, L), each token's own: it is the one before that is to predict it.
            weights: (B, L), of labels.

        Returns:
            (B, L, V). Given labels, twice (B, L), the losses of what follows each token: weighted, to be summed for
            gradients (:func:`~dryfit.tasks.lm_loss.chunked_losses`); and without weights and gradients.
        """
        inputs = {"attention_mask": attention_mask} if position_ids is None else {"position_ids": position_ids}
        if labels is None:
            return self.decoder(input_ids=input_ids, **inputs, use_cache=False).logits
        base = self.base()
        hidden_BLH = hidden_states(self.decoder, base, input_ids=input_ids, **inputs)
        weighted_N, losses_N = chunked_losses(
            hidden_BLH.flatten(0, 1),
            _following(labels, IGNORED),
            None if weights is None else _following(weights, 0),
            partial(scores_of, self.decoder, base),
            chunk=chunk_tokens(base.config.get_text_config().vocab_size),
            losses_of=self.chunk_losses,
        )
        return weighted_N.view(labels.shape), losses_N.view(labels.shape)


def _following(values_BL: torch.Tensor, last: int) -> torch.Tensor:
    """Return what stands behind each token, flat. So labels are shifted: a shifted view of scores would be copied."""
    return F.pad(values_BL[:, 1:], (0, 1), value=last).flatten()


@final
class CausalLmTask(EncoderTask):
    """Cross entropy of each learned token, given those before it.

    Args:
        context: Settings, rows and tokens.
        token_loss: Sums the losses of tokens, where the model gives scores.
        in_chunks: Whether the model gives losses, from the scores of some tokens at a time.
    """

    kind: ClassVar[Kind] = Kind.CAUSAL_LM
    padded: ClassVar[tuple[str, ...]] = PADDED

    def __init__(
        self, context: TaskContext, token_loss: TokenLoss = whole_token_loss, *, in_chunks: bool = False
    ) -> None:
        super().__init__(context)
        self._token_loss = token_loss
        self._in_chunks = in_chunks
        self._lm = context.settings.lm
        self._lora = context.settings.lora
        self._mix = self._lm.mix if self._lm.format == "both" else None

    def with_token_loss(self, token_loss: TokenLoss) -> "CausalLmTask":
        """Return the task with another sum of token losses; see :class:`~dryfit.tasks.lm_loss.OverTokens`."""
        return CausalLmTask(self.context, token_loss, in_chunks=self._in_chunks)

    def with_loss_in_chunks(self) -> "CausalLmTask":
        """Return the task with its loss computed from the scores of some tokens at a time."""
        return CausalLmTask(self.context, self._token_loss, in_chunks=True)

    @property
    def inputs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]  # here it depends
        """Entries of a batch that the model takes."""
        return (*INPUTS, "labels", "weights") if self._in_chunks else INPUTS

    @property
    def required(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]  # here it depends
        """Columns that prompts and answers are made of."""
        parts = parts_of(self._lm)
        columns = {PromptPart.CRITERIA: "label", PromptPart.EVIDENCE: "evidence"}
        wanted = {columns[part] for part in parts if part in columns}
        return frozenset(wanted | ({"criterion"} if self._lm.format == "instruction" else set[str]()))

    def metric_names(self) -> tuple[str, ...]:
        """Return the loss of a token of the answers; where answers are generated, also what measures them."""
        if not self._generates:
            return (Metric.LOSS,)
        quoted = (Metric.TOKEN_F1,) if PromptPart.EVIDENCE in parts_of(self._lm) else ()
        own = () if self._lm.metric is None else answer_metric(self._lm.metric).names
        return (Metric.LOSS, Metric.EXACT_MATCH, *quoted, *own)

    @property
    def _generates(self) -> bool:
        return self._lm.format != "text" and self._lm.generate_rows > 0

    def check_rows(self, splits: Splits) -> None:
        """Refuse rows without any evidence where prompts ask for it.

        Raises:
            DataError: No training row has evidence.
        """
        if PromptPart.EVIDENCE in parts_of(self._lm) and not any(row.evidence for row in splits[TRAIN]):
            raise DataError(
                "preparing the split train",
                "no row has evidence",
                allowed=f'rows with evidence (lm.format = "{self._lm.format}" asks for it)',
                hint='name its column with data.evidence, or take lm.format = "criteria"',
            )

    def token_key(self) -> str:
        """Return the keys that prompts and answers depend on, and whether examples share a sequence."""
        decides = {"format", "criteria_prompt", "evidence_prompt", "answers", "no_evidence", "chat", "packing"}
        return f"causal-lm {canonical_json(self._lm.model_dump(mode='json', include=decides))}"

    def tokenise(self, splits: Splits, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Tokenise prompts and answers of all rows; with ``lm.packing`` training examples share sequences."""
        most = self.context.settings.train.max_length
        prompts = PromptTokenizer(tokenizer, self._lm, most)
        words = self._words()
        sets: dict[str, TokenSet] = {}
        for name, rows in splits.items():
            examples = [one for row in rows for one in prompts.examples(exchanges(row, self._lm, words))]
            packed = self._lm.packing and name == TRAIN
            packs = pack([len(one.ids) for one in examples], most, seed=_PACK_SEED) if packed else None
            sets[name] = sequences(examples, packs)
        return Tokens(sets, pad_id=prompts.pad_id, cls_last=False, pairs=splits[TRAIN][0].criterion is not None)

    def model(self, make: MakeBase, *, seed: int = 0) -> CausalLm:
        """Return the language model; with adapters, which the seed draws, its weights are frozen in ``lora.base``."""
        model, lora, train = self.context.settings.model, self._lora, self.context.settings.train
        if lora.r == 0:
            decoder = make(model, self.kind)
            return build(lambda: CausalLm(decoder))
        base = base_format(lora, train)
        check_precision(base, train.precision)
        decoder = make(model, self.kind, frozen=base)
        adapted = new_adapter(
            decoder, r=lora.r, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets, seed=seed
        )
        return build(lambda: CausalLm(adapted))

    def check_model(self, model: TaskModel) -> None:
        """Refuse packing for a model in which one example would see another.

        Raises:
            ConfigError: It would.
        """
        if self._lm.packing:
            check_packing(model)

    def collate(self, tokens: TokenSet, rows: Sequence[int]) -> Batch:
        """Pad some sequences, with labels."""
        return labelled(
            tokens,
            rows,
            pad_id=self.context.facts.pad_id,
            learn_prompt=self._lm.learn_prompt,
            packing=self._lm.packing,
            mix=self._mix,
        )

    def batch_sizes(self, rows: int, length: int, *, segments: bool) -> dict[str, tuple[int, ...]]:
        """Return (rows, length) for every entry: each token has a label."""
        del segments
        names = entries(learn_prompt=self._lm.learn_prompt, packing=self._lm.packing, mix=self._mix is not None)
        return dict.fromkeys(names, (rows, length))

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """Return the summed weights of the learned tokens; their number where all weigh the same."""
        learned_BL = batch["labels"][:, 1:] != IGNORED
        if "weights" in batch:
            return batch["weights"][:, 1:].masked_fill(~learned_BL, 0).sum()
        return learned_BL.sum()

    def loss_sum(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Return the loss summed over tokens, in fp32 or better."""
        if not isinstance(outputs, torch.Tensor):
            return outputs[0].sum()
        weights_N = _following(batch["weights"], 0) if "weights" in batch else None
        return self._token_loss(outputs.flatten(0, 1), _following(batch["labels"], IGNORED), weights_N)

    def keep(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Keep for each row the summed loss and the number of its answers' tokens; all tokens weigh the same.

        So the loss compares trials with other weights of the parts, or that learn prompts too. It is computed row by
        row, since the scores of many are large.
        """
        answers_BL = batch.get("answers", batch["labels"])
        if not isinstance(outputs, torch.Tensor):  # losses of labels, among which are all answers
            counts_BL = answers_BL[:, 1:] != IGNORED
            lost_B = outputs[1][:, :-1].masked_fill(~counts_BL, 0).sum(dim=1)
            return torch.stack([lost_B, counts_BL.sum(dim=1).to(lost_B.dtype)], dim=1)
        rows: list[torch.Tensor] = []
        for scores_LV, answers_L in zip(outputs, answers_BL, strict=True):
            next_L = answers_L[1:]
            lost = self._token_loss(scores_LV[:-1], next_L)
            rows.append(torch.stack([lost, (next_L != IGNORED).sum().to(lost.dtype)]))
        return torch.stack(rows)

    def metrics(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss of a token."""
        del tokens, fitted
        lost, count = kept.double().sum(dim=0).tolist()
        return {Metric.LOSS: lost / count if count else math.nan}

    def baselines(self, splits: Splits, tokens: Callable[[], Tokens]) -> Iterator[Baseline]:
        """Yield what the metrics are worth without a model."""
        yield from token_baselines(tokens)
        if self._generates:

            def measure(said: Sequence[str]) -> Measured:
                rows, asked, _ = self._quiz(tokens().splits[VALIDATION])
                return measured(self._lm, rows, asked.answered([said[row] for row in rows]))

            yield from answer_baselines(Quiz(splits, self._lm, self._words(), measure))

    def _words(self) -> tuple[str, ...]:
        """Return the answer of each class; empty where prompts ask for none."""
        asked = PromptPart.CRITERIA in parts_of(self._lm)
        return answer_words(self._lm, self.context.data.num_labels) if asked else ()

    def scored_rows(self, kept: torch.Tensor, tokens: TokenSet, fitted: Mapping[str, float]) -> Iterator[ScoredRow]:
        """Yield each example with the summed loss of its answer's tokens."""
        del fitted
        for name, (lost, count) in zip(tokens.source_names, kept.double().tolist(), strict=True):
            yield ScoredRow(name, {}, {}, values={Metric.LOSS: lost, LOSS_TERMS: count})

    def measure(
        self, model: TaskModel, tokens: TokenSet, *, batch_rows: int, beat: Callable[[], None]
    ) -> Mapping[str, float] | Measured:
        """Return the metrics of the answers to a fixed sample of the rows."""
        assert isinstance(model, CausalLm)
        if not self._generates:
            return {}
        rows, asked, prompts = self._quiz(tokens)
        at_once = self.measured_rows(batch_rows)
        answers = self._answer(model.decoder, asked.questions, prompts, batch_rows=at_once, beat=beat)
        return measured(self._lm, rows, asked.answered(answers))

    @property
    def _answer(self) -> "partial[list[str]]":
        """Answers prompts as the settings say."""
        return partial(answer, max_new_tokens=self._lm.max_new_tokens, num_beams=self._lm.num_beams)

    def _quiz(self, tokens: TokenSet) -> tuple[list[int], Asked, PromptTokenizer]:
        """Return the examples of a split that are answered, and their prompts."""
        rows = sampled(len(tokens), self._lm.generate_rows, seed=0)
        prompts = self._prompts(load_tokenizer(self.context.settings.model))
        return rows, asked_of(tokens, rows, prompts), prompts

    def measured_rows(self, batch_rows: int) -> int:
        """Return how many prompts are answered at once."""
        if not self._generates:
            return 0
        return min(PROMPTS_AT_ONCE, batch_rows, self._lm.generate_rows)

    def rehearse_measure(self, model: TaskModel, rows: int, length: int) -> None:
        """Answer prompts as long as whole rows, on tensors without values."""
        rehearse(model.base(), rows, length, max_new_tokens=self._lm.max_new_tokens, num_beams=self._lm.num_beams)

    def unfit(self, rows: Sequence[UnlabelledRow], tokenizer: PreTrainedTokenizerBase) -> Mapping[int, DataError]:
        """Return an error for each row whose prompt does not fit even without its text, or that lacks a criterion."""
        prompts, errors = self._prompts(tokenizer), dict[int, DataError]()
        for index, row in enumerate(rows):
            try:
                self._asked(row, prompts)
            except DataError as error:
                errors[index] = error
        return errors

    def generate(
        self,
        model: TaskModel,
        rows: Sequence[Readable],
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_rows: int,
        beat: Callable[[], None],
    ) -> Iterator[dict[str, object]]:
        """Yield the answers to each row's prompts; of a plain text, its continuation."""
        assert isinstance(model, CausalLm)
        prompts = self._prompts(tokenizer)
        asked = [self._asked(cast("UnlabelledRow", row), prompts) for row in rows]
        questions = [ids for row in asked for ids in row]
        texts = iter(self._answer(model.decoder, questions, prompts, batch_rows=batch_rows, beat=beat))
        for _ in rows:
            parts = {part: next(texts).strip() for part in parts_of(self._lm)}
            yield {"text": parts[PromptPart.WHOLE]} if PromptPart.WHOLE in parts else dict(self._prediction(parts))

    def _prediction(self, answers: Mapping[PromptPart, str]) -> Iterator[tuple[str, object]]:
        if PromptPart.CRITERIA in answers:
            words = answer_words(self._lm, self.context.data.num_labels)
            word = answers[PromptPart.CRITERIA]
            yield "answer", word
            label = words.index(word) if word in words else None
            yield "label", self.context.data.labels[label] if label is not None and self.context.data.labels else label
        if PromptPart.EVIDENCE in answers:
            evidence = answers[PromptPart.EVIDENCE]
            yield "evidence", None if evidence == self._lm.no_evidence.strip() else evidence

    def _prompts(self, tokenizer: PreTrainedTokenizerBase) -> PromptTokenizer:
        return PromptTokenizer(tokenizer, self._lm, self.context.settings.train.max_length)

    def _asked(self, row: UnlabelledRow, prompts: PromptTokenizer) -> list[list[int]]:
        """Return the ids of a row's prompts, which leave room for an answer."""
        room = min(self._lm.max_new_tokens, self.context.settings.train.max_length // 2)
        return [prompts.question(one, room=room)[0] for one in questions(row, self._lm)]
