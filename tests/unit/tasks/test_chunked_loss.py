"""A loss in chunks of tokens, against the loss of all scores: values, gradients, formats, and where it is not taken."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dryfit.settings.choices import Precision
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import ExecutionPlan
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.tables import DataSettings, LmSettings, TrialSettings
from dryfit.tasks import causal_lm
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.causal_lm import CausalLm, CausalLmTask
from dryfit.tasks.lm_loss import CHUNK_SCORES, IGNORED, cannot_chunk, chunk_tokens, chunked_losses, scores_differ
from dryfit.tasks.prompts import Example, PromptPart, sequences
from dryfit.tasks.tokens import TokenFacts, pack
from dryfit.training.model import as_planned, cannot_chunk_loss, loss_in_chunks
from dryfit.training.step import backward_batch

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 300,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 2,
}
KEYS = {"num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": KEYS,
    "llama": {**KEYS, "tie_word_embeddings": True},
    "gpt2": {},
    "mistral": KEYS,
    "gemma2": {**KEYS, "final_logit_softcapping": 0.5},
    "gemma3_text": {**KEYS, "final_logit_softcapping": 0.5},
    "cohere": {"num_key_value_heads": 2, "logit_scale": 0.3},
    "granite": {"num_key_value_heads": 2, "logits_scaling": 7.0},
    "gpt_neox": {"tie_word_embeddings": False},
    "bloom": {},
    "phi": {},
    "qwen3": KEYS,
    "mamba": {"state_size": 4, "conv_kernel": 2, "use_mambapy": False},
}
CLOSE = {"mamba": 1e-6}
"""Its layers compute in fp32 whatever its weights are."""

CHANGING = ("gemma2", "gemma3_text", "cohere", "granite")
"""Those whose scores are not the output of their head."""


def model_of(name: str, *, lora: bool = False, on_head: bool = False, dtype: torch.dtype = torch.float64) -> CausalLm:
    torch.manual_seed(5)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **MODELS[name]}))
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if not lora:
        return CausalLm(model)
    targets = ["q_proj", "lm_head"] if on_head else ["q_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return CausalLm(adapted.to(dtype))


def task_of(*, learn_prompt: bool = False, mix: float | None = None, packing: bool = False) -> CausalLmTask:
    lm = LmSettings(
        format="criteria" if mix is None else "both", mix=mix or 0.5, learn_prompt=learn_prompt, packing=packing
    )
    return CausalLmTask(TaskContext(TrialSettings(lm=lm), DataSettings(), TokenFacts(pad_id=1)))


def examples(count: int = 7) -> list[Example]:
    draw = torch.Generator().manual_seed(5)
    found: list[Example] = []
    for number in range(count):
        length = int(torch.randint(2, 25, (1,), generator=draw))
        ids = tuple(torch.randint(2, 300, (length,), generator=draw).tolist())
        part = PromptPart.CRITERIA if number % 3 else PromptPart.EVIDENCE
        found.append(Example(f"e{number}", ids, int(torch.randint(0, length, (1,), generator=draw)), part))
    return found


def step(
    model: CausalLm, task: Task, *, rows: int = 100, packing: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    found = examples()
    tokens = sequences(found, pack([len(one.ids) for one in found], 40, seed=1) if packing else None)
    batch = task.collate(tokens, range(len(tokens)))
    model.zero_grad()
    loss = backward_batch(
        model, batch, task, micro_batch=rows, backward=lambda value: value.backward(), autocast=nullcontext
    )
    return loss, {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def same(found: torch.Tensor, wanted: torch.Tensor, close: float = 1e-12) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= close * max(1.0, float(wanted.abs().max()))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "chunk_tokens", lambda _: 13)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_all_scores(name: str) -> None:
    model, task = model_of(name).train(), task_of()
    assert scores_differ(model.decoder, model.base()) is None
    wanted, expected = step(model, task, rows=3)
    found, gradients = step(model, loss_in_chunks(task, model), rows=3)
    same(found, wanted)
    assert gradients.keys() == expected.keys()
    largest = max(float(one.abs().max()) for one in expected.values())
    close = CLOSE.get(name, 1e-12) * largest
    for key, gradient in gradients.items():
        assert float((gradient - expected[key]).abs().max()) <= close, key


@pytest.mark.parametrize("name", CHANGING)
def test_a_bare_head_would_give_another_loss(name: str) -> None:
    """So what is tested above is really there."""
    model = model_of(name)
    hidden = torch.randn(4, 32, dtype=torch.float64)
    head: Any = model.base().get_output_embeddings()
    from_head = F.linear(hidden, head.weight)
    from_model = causal_lm.scores_of(model.decoder, model.base(), hidden)
    assert float((from_head - from_model).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("learn_prompt", "mix"), [(True, None), (False, 0.8), (False, None)])
def test_masks_and_weights_count_as_in_the_whole_loss(packing: bool, learn_prompt: bool, mix: float | None) -> None:
    model, task = model_of("qwen2").train(), task_of(learn_prompt=learn_prompt, mix=mix, packing=packing)
    wanted, expected = step(model, task, rows=2, packing=packing)
    found, gradients = step(model, loss_in_chunks(task, model), rows=2, packing=packing)
    same(found, wanted)
    for key, gradient in gradients.items():
        same(gradient, expected[key])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's business
@pytest.mark.parametrize("on_head", [False, True])
def test_adapters_get_the_same_gradients_and_frozen_weights_none(on_head: bool) -> None:
    model, task = model_of("qwen2", lora=True, on_head=on_head).train(), task_of()
    wanted, expected = step(model, task)
    found, gradients = step(model, loss_in_chunks(task, model))
    same(found, wanted)
    assert gradients.keys() == expected.keys() and all("lora_" in key for key in gradients)
    assert any("lm_head" in key for key in gradients) == on_head
    for key, gradient in gradients.items():
        same(gradient, expected[key])


def test_a_validation_keeps_the_same() -> None:
    for task in (task_of(), task_of(learn_prompt=True), task_of(mix=0.9)):
        model = model_of("gemma2").eval()
        chunked = loss_in_chunks(task, model)
        batch = task.collate(sequences(examples()), range(7))
        with torch.inference_mode():
            whole, parts = (
                one.keep(model(**{name: batch[name] for name in one.inputs if name in batch}), batch)
                for one in (task, chunked)
            )
        same(parts, whole)


class Head(nn.Linear):
    """Counts how often scores are computed, and of how many tokens at once."""

    def __init__(self, dtype: torch.dtype, words: int = 50) -> None:
        super().__init__(8, words, dtype=dtype)
        self.calls: list[int] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        self.calls.append(len(input))
        return super().forward(input)


@given(
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 45),
    trained=st.sampled_from(["both", "head", "features"]),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_any_chunks_give_the_whole(tokens: int, chunk: int, trained: str, weighted: bool, seed: int) -> None:
    torch.manual_seed(seed)
    head = Head(torch.float64).requires_grad_(trained != "features")
    hidden = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=trained != "head")
    targets = torch.randint(0, 50, (tokens,)).masked_fill(torch.rand(tokens) < 0.3, IGNORED)
    weights = torch.rand(tokens, dtype=torch.float64) if weighted else None

    def results(losses: torch.Tensor) -> list[torch.Tensor | None]:
        hidden.grad, _ = None, head.zero_grad()
        (losses.sum() * 0.7).backward()
        return [losses.detach(), hidden.grad, head.weight.grad, head.bias.grad]

    found = results(chunked_losses(hidden, targets, weights, head, chunk=chunk)[0])
    assert head.calls == [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    whole = F.cross_entropy(head(hidden), targets, ignore_index=IGNORED, reduction="none")
    for one, wanted in zip(found, results(whole if weights is None else whole * weights), strict=True):
        assert (one is None) == (wanted is None)
        if one is not None and wanted is not None:
            same(one, wanted)


def test_sums_are_in_fp32_whatever_the_scores() -> None:
    torch.manual_seed(0)
    head = Head(torch.bfloat16, words=3000).requires_grad_(False)
    hidden = torch.randn(64, 8, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 3000, (64,))
    losses, own = chunked_losses(hidden, targets, None, head, chunk=16)
    assert losses.dtype == own.dtype == torch.float32
    wanted = F.cross_entropy(head(hidden).double(), targets, reduction="sum")
    assert float(losses.detach().sum()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    losses.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "twice"), [(torch.bfloat16, False), (torch.float16, True)])
def test_under_autocast_gradients_are_as_good_as_the_whole_losss(dtype: torch.dtype, twice: bool) -> None:
    """fp16: with a scale under which the whole loss has gradients, and which only the backward pass knows."""
    torch.manual_seed(0)
    head, scale = Head(torch.float32, words=2000), 2.0**12 if twice else 1.0
    hidden = torch.randn(96, 8, requires_grad=True)
    targets = torch.randint(0, 2000, (96,))

    def gradients(*, chunked: bool) -> tuple[torch.Tensor, torch.Tensor]:
        hidden.grad, _ = None, head.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            if chunked:
                loss = chunked_losses(hidden, targets, None, head, chunk=32)[0].sum()
            else:
                loss = F.cross_entropy(head(hidden).float(), targets, reduction="sum")
        (loss / 96 * scale).backward()
        assert hidden.grad is not None and head.weight.grad is not None
        return hidden.grad / scale, head.weight.grad / scale

    whole, parts = gradients(chunked=False), gradients(chunked=True)
    assert head.calls == ([96] + [32] * 6 if twice else [96] + [32] * 3)
    head.float(), hidden.requires_grad_()
    exact = torch.autograd.grad(
        F.cross_entropy(F.linear(hidden, head.weight, head.bias), targets), [hidden, head.weight]
    )
    for one, other, true in zip(parts, whole, exact, strict=True):
        assert one.dtype == torch.float32
        assert float((one - true).norm()) <= 1.1 * float((other - true).norm()) + 1e-7 * float(true.norm())


def test_a_scaler_sees_gradients_that_overflow() -> None:
    torch.manual_seed(0)
    head, hidden = Head(torch.float32), torch.randn(40, 8, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # pyright: ignore
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    before = head.weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.float16):
        losses, _ = chunked_losses(hidden, torch.randint(0, 50, (40,)), None, head, chunk=16)
    scaler.scale(losses.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(head.weight, before) and scaler.get_scale() == 2.0**23


def test_another_use_of_the_losses_than_a_sum_has_no_silent_gradient() -> None:
    head, hidden = Head(torch.float64), torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    losses, _ = chunked_losses(hidden, torch.arange(6), None, head, chunk=4)
    (losses * torch.arange(6)).sum().backward()
    assert hidden.grad is not None and hidden.grad.isnan().all()


def test_chunks_are_as_large_as_their_scores_may_be() -> None:
    for words in (10, 32_000, 151_936, 256_000, 10**8):
        tokens = chunk_tokens(words)
        assert tokens % 64 == 0 and (tokens == 64 or tokens * words <= CHUNK_SCORES < (tokens + 64) * words)


def test_a_model_that_keeps_its_stack_elsewhere_has_the_whole_loss() -> None:
    config = AutoConfig.for_model("opt", **{**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    assert "opt" in str(cannot_chunk(model, model))
    lm, task = CausalLm(model), task_of()
    plan = ExecutionPlan(device=DeviceKind.CPU, effective_batch=4, micro_batch=4, accumulation=1)
    assert as_planned(task, lm, plan, Precision.FP32) is task
    with pytest.raises(ConfigError, match=r"execution.chunked_loss = true.*opt"):
        as_planned(task, lm, plan.model_copy(update={"chunked_loss": True}), Precision.FP32)


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        (lambda scores: scores - scores.mean(dim=1, keepdim=True), "depend on those beside them"),
        (lambda scores: scores.cumsum(dim=1), "depend on those beside them"),
        (lambda scores: F.dropout(scores, 0.5), "are random"),
    ],
    ids=["mean", "cumsum", "dropout"],
)
def test_a_model_of_unknown_code_is_tried(tail: Any, why: str) -> None:
    lm = model_of("qwen2")
    model, own = lm.base(), lm.base().forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=tail(own(*args, **kwargs).logits))

    model.forward = forward
    assert cannot_chunk(model, model) is None  # its shapes show nothing
    assert why in str(scores_differ(model, model))
    plan = ExecutionPlan(device=DeviceKind.CPU, effective_batch=4, micro_batch=4, accumulation=1)
    assert as_planned(task := task_of(), lm, plan, Precision.FP32) is task


def test_a_model_whose_code_reads_tokens_after_its_stack_has_the_whole_loss() -> None:
    lm = model_of("qwen2")
    model, own = lm.base(), lm.base().forward

    def forward(input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        logits = own(input_ids=input_ids, **kwargs).logits
        return SimpleNamespace(logits=logits + input_ids.unsqueeze(-1))  # pyright: ignore

    model.forward = forward
    assert "needs more than their output" in str(cannot_chunk(model, model))


def test_what_runs_follows_the_plan_and_the_precision() -> None:
    lm, task = model_of("qwen2", dtype=torch.float32), task_of()
    plan = ExecutionPlan(device=DeviceKind.CPU, effective_batch=4, micro_batch=4, accumulation=1)

    def chunked(plan: ExecutionPlan, precision: Precision) -> bool:
        return "labels" in as_planned(task, lm, plan, precision).inputs

    assert chunked(plan, Precision.FP32) and chunked(plan, Precision.BF16) and not chunked(plan, Precision.FP16)
    for wanted in (True, False):
        assert chunked(plan.model_copy(update={"chunked_loss": wanted}), Precision.FP16) == wanted
    assert chunked(plan.model_copy(update={"tp": 2}), Precision.FP32)
    assert not chunked(plan.model_copy(update={"dp": 2}), Precision.FP32)
    with pytest.raises(ConfigError, match="each process holds a part of the weights"):
        chunked(plan.model_copy(update={"dp": 2, "chunked_loss": True}), Precision.FP32)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's business
def test_over_ranks_the_head_must_have_no_adapter() -> None:
    task = task_of()
    for on_head in (False, True):
        lm = model_of("qwen2", lora=True, on_head=on_head)
        assert cannot_chunk_loss(task, lm) is None
        assert (cannot_chunk_loss(task, lm, tp=2) is not None) == on_head
