"""Packing, and the loss of a causal language model, against examples alone, in fp64 and with gradients."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

import tiny_lms
from dryfit.settings.choices import BaseFormat, Precision
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import WEIGHT_FORMATS, base_format, check_precision
from dryfit.settings.tables import DataSettings, LmSettings, LoraSettings, TrainSettings, TrialSettings
from dryfit.tasks.base import TaskContext
from dryfit.tasks.causal_lm import CausalLm, CausalLmTask, check_packing
from dryfit.tasks.lm_loss import over_tokens, whole_token_loss
from dryfit.tasks.prompts import Example, PromptPart, sequences
from dryfit.tasks.tokens import TokenFacts, pack
from dryfit.training.step import backward_batch

EXAMPLES = 14
CAPACITY = 48


def task_of(*, learn_prompt: bool = False, mix: float | None = None, packing: bool = True) -> CausalLmTask:
    lm = LmSettings(
        format="criteria" if mix is None else "both", mix=mix or 0.5, learn_prompt=learn_prompt, packing=packing
    )
    return CausalLmTask(TaskContext(TrialSettings(lm=lm), DataSettings(), TokenFacts(pad_id=1)))


def examples(*, count: int = EXAMPLES, seed: int = 5) -> list[Example]:
    draw = torch.Generator().manual_seed(seed)
    found: list[Example] = []
    for number in range(count):
        length = int(torch.randint(2, 30, (1,), generator=draw))
        ids = tuple(torch.randint(2, 300, (length,), generator=draw).tolist())
        prompt = int(torch.randint(0, length, (1,), generator=draw))
        found.append(Example(f"e{number}", ids, prompt, PromptPart.CRITERIA if number % 3 else PromptPart.EVIDENCE))
    return found


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CausalLm]:
    made: dict[str, Path] = {}

    def of(architecture: str, attention: str = "sdpa") -> CausalLm:
        if architecture not in made:
            made[architecture] = tiny_lms.causal_lm(tmp_path_factory.mktemp("lm") / architecture, architecture)
        found = AutoModelForCausalLM.from_pretrained(
            made[architecture], dtype=torch.float64, attn_implementation=attention
        )
        for module in found.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(double_norm, module)
        return CausalLm(found.train())

    return of


def double_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What transformers' own norms compute, who round to fp32 on the way."""
    size = hidden.pow(2).mean(-1, keepdim=True)
    return module.weight * hidden * torch.rsqrt(size + module.variance_epsilon)


@pytest.fixture
def double_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention asks for its softmax in fp32, whatever it is given."""
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim=dim))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def packs_of(found: list[Example]) -> list[list[int]]:
    return pack([len(one.ids) for one in found], CAPACITY, seed=1)


def alone(model: CausalLm, found: list[Example], *, learn_prompt: bool, mix: float | None) -> torch.Tensor:
    """The loss of each example in a batch of its own, written down anew from the definition."""
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for example in found:
        ids, prompt = torch.tensor(example.ids), example.prompt_tokens
        weight = 1.0 if mix is None else mix if example.part is PromptPart.CRITERIA else 1 - mix
        log_p = F.log_softmax(model.decoder(input_ids=ids[None], use_cache=False).logits[0], dim=-1)
        for place in range(1 if learn_prompt else max(1, prompt), len(ids)):
            total = total - weight * log_p[place - 1, ids[place]]
            weights += weight
    return total / weights


@pytest.mark.parametrize(
    ("architecture", "attention", "learn_prompt", "mix"),
    [
        ("qwen2", "sdpa", False, None),
        ("qwen2", "sdpa", True, None),
        ("qwen2", "eager", False, 0.8),
        ("llama", "sdpa", False, 0.8),
        ("llama", "eager", True, None),
        ("mistral", "sdpa", False, None),
    ],
)
@pytest.mark.usefixtures("double_softmax")
def test_packed_examples_are_the_examples_alone(
    decoder: Callable[..., CausalLm], architecture: str, attention: str, learn_prompt: bool, mix: float | None
) -> None:
    model, found, task = decoder(architecture, attention), examples(), task_of(learn_prompt=learn_prompt, mix=mix)
    wanted = alone(model, found, learn_prompt=learn_prompt, mix=mix)
    wanted.backward()
    expected = gradients(model)
    packs = packs_of(found)
    assert len(packs) < EXAMPLES / 2
    batch = task.collate(sequences(found, packs), range(len(packs)))
    outputs = model(**{name: batch[name] for name in task.inputs})
    loss = task.loss_sum(outputs, batch) / task.batch_weight(batch)
    assert float((loss - wanted).detach().abs()) < 1e-10
    loss.backward()
    for name, gradient in gradients(model).items():
        assert float((gradient - expected[name]).abs().max()) < 1e-10, name
    for row, one in enumerate(packs):  # the scores themselves, one example after the other
        end = 0
        for number in one:
            first, end = end, end + len(found[number].ids)
            with torch.no_grad():
                scores = model.decoder(input_ids=torch.tensor([found[number].ids]), use_cache=False).logits[0]
            assert float((outputs[row, first:end].detach() - scores).abs().max()) < 1e-10


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mix", [None, 0.8])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_batch_in_micro_batches_is_the_whole_batch(
    decoder: Callable[..., CausalLm], packed: bool, mix: float | None, rows: int
) -> None:
    model, examples_, task = decoder("qwen2"), examples(), task_of(mix=mix, packing=packed)
    tokens = sequences(examples_, packs_of(examples_) if packed else None)
    batch = task.collate(tokens, range(len(tokens)))
    wanted = alone(model, examples_, learn_prompt=False, mix=mix)
    wanted.backward()
    expected = gradients(model)
    passes: list[torch.Tensor] = []

    def backward(value: torch.Tensor) -> None:
        passes.append(value)
        value.backward()

    found = backward_batch(model, batch, task, micro_batch=rows, backward=backward, autocast=nullcontext)
    assert len(passes) == -(-len(tokens) // rows)
    assert float((found - wanted.detach()).abs()) < 1e-10
    for name, gradient in gradients(model).items():
        assert float((gradient - expected[name]).abs().max()) < 1e-10, name


def test_the_normaliser_of_many_tokens_is_exact_where_scores_are_in_half_precision() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return (self.scores + torch.zeros(*input_ids.shape, 4)).half()

    width = 2 * 2049 + 2  # 4099 tokens are learned, which fp16 would make 4100
    batch = {
        "input_ids": torch.zeros(1, width, dtype=torch.int64),
        "attention_mask": torch.ones(1, width, dtype=torch.int64),
        "labels": torch.zeros(1, width, dtype=torch.int64),
    }
    found = backward_batch(
        Half(), batch, task_of(), micro_batch=1, backward=lambda value: value.backward(), autocast=nullcontext
    )
    assert float(found) == pytest.approx(float(torch.tensor(4.0).log()), rel=1e-6)


def test_a_class_that_is_derived_from_the_task_needs_all_scores_for_all_that_is_known() -> None:
    task = task_of()
    derived = type("Derived", (CausalLmTask,), {})(task.context)
    assert over_tokens(task) is task and over_tokens(derived) is None


def test_the_sum_over_tokens_may_be_computed_by_somebody_else() -> None:
    asked: list[tuple[int, ...]] = []

    def token_loss(scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        asked.append(tuple(scores.shape))
        assert weights is None or weights.shape == targets.shape
        return whole_token_loss(scores, targets, weights) * 2

    task, found = task_of(mix=0.8), examples()
    twice = task.with_token_loss(token_loss)
    batch = task.collate(sequences(found, None), range(3))
    scores = torch.randn(*batch["input_ids"].shape, 300, generator=torch.Generator().manual_seed(1))
    rows, length = batch["input_ids"].shape
    assert float(twice.loss_sum(scores, batch)) == 2 * float(task.loss_sum(scores, batch)) > 0
    kept, whole = twice.keep(scores, batch), task.keep(scores, batch)
    assert torch.equal(kept, whole * torch.tensor([2.0, 1.0]))
    assert asked == [(rows * length, 300), *[(length - 1, 300)] * rows]


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "mistral"])
def test_packing_is_allowed_where_examples_do_not_see_each_other(
    decoder: Callable[..., CausalLm], architecture: str
) -> None:
    model = decoder(architecture)
    check_packing(model)
    assert model.training


def test_packing_is_refused_where_no_positions_are_taken(decoder: Callable[..., CausalLm]) -> None:
    with pytest.raises(ConfigError, match=r"lm.packing = true.*mamba takes no positions"):
        check_packing(decoder("mamba", "eager"))


def test_packing_is_refused_where_examples_see_each_other(decoder: Callable[..., CausalLm]) -> None:
    """A decoder that does not listen to positions, as an architecture with code of its own may be."""
    inner = decoder("qwen2").decoder

    class Deaf(nn.Module):
        config = inner.config

        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    with pytest.raises(ConfigError, match="see each other"):
        check_packing(CausalLm(Deaf()))


def test_a_validation_loss_is_the_answers_whatever_is_learned(decoder: Callable[..., CausalLm]) -> None:
    model, found = decoder("qwen2").eval(), examples()
    wanted = float(alone(model, found, learn_prompt=False, mix=None).detach())
    tokens = sequences(found)
    for task in (task_of(), task_of(learn_prompt=True, packing=False), task_of(mix=0.9)):
        batch = task.collate(tokens, range(len(tokens)))
        with torch.no_grad():
            outputs = model(**{name: batch[name] for name in task.inputs if name in batch})
        kept = task.keep(outputs, batch)
        assert kept.shape == (EXAMPLES, 2)
        assert task.metrics(kept, tokens, {})["loss"] == pytest.approx(wanted, rel=1e-6)


def test_batches_have_the_entries_that_are_planned(decoder: Callable[..., CausalLm]) -> None:
    tokens = sequences(examples())
    for task in (task_of(packing=False), task_of(learn_prompt=True), task_of(mix=0.9)):
        batch = task.collate(tokens, [3, 1])
        sizes = task.batch_sizes(2, batch["input_ids"].shape[1], segments=False)
        assert {name: tuple(values.shape) for name, values in batch.items()} == sizes
        assert all(values.element_size() == 8 for values in batch.values())  # planned as int64


FORMATS = tuple(one for one in Precision if one is not Precision.AUTO)
COMPUTED = tuple(one for one in FORMATS if one is not Precision.TF32)
REFUSED = {
    (BaseFormat.FP16, None, Precision.FP32): "without a scale",
    (BaseFormat.NF4, Precision.FP16, Precision.FP32): "without a scale",
    (BaseFormat.NF4, Precision.FP16, Precision.BF16): "without a scale",
    (BaseFormat.INT8, Precision.FP16, Precision.FP32): "without a scale",
    (BaseFormat.INT8, Precision.FP16, Precision.BF16): "without a scale",
    (BaseFormat.INT8, None, Precision.FP32): "in 16 bits",
    (BaseFormat.FP16, None, Precision.TF32): "without a scale",
    (BaseFormat.NF4, Precision.FP16, Precision.TF32): "without a scale",
    (BaseFormat.INT8, Precision.FP16, Precision.TF32): "without a scale",
    (BaseFormat.INT8, None, Precision.TF32): "in 16 bits",
    **{(BaseFormat.INT8, Precision.FP32, precision): "in 16 bits" for precision in FORMATS},
}


@pytest.mark.parametrize("base", BaseFormat)
def test_a_base_in_fp16_needs_a_scale_and_one_in_8_bits_computes_in_16(base: BaseFormat) -> None:
    for compute, precision in product((None, *COMPUTED) if WEIGHT_FORMATS[base].quantised else (None,), FORMATS):
        format_ = base_format(LoraSettings(base=base, compute=compute), TrainSettings(precision=precision))
        told = REFUSED.get((base, compute, precision))
        if told is None:
            check_precision(format_, precision)
        else:
            with pytest.raises(ConfigError, match=told):
                check_precision(format_, precision)
