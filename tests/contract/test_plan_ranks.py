"""The step that is planned where a model is sharded over ranks is that of one rank: what it holds and what it sends."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dryfit.gpu.events import SegmentKind, Shape
from dryfit.parallel import proved_plans as sharding
from dryfit.parallel.collectives import Ranks, SimulatedRanks, simulate
from dryfit.parallel.proved_plans import ShardPlans
from dryfit.parallel.tensor_parallel import TensorParallel
from dryfit.plans.timeline import end_bytes, peak_bytes
from dryfit.plans.tracer import Variant
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.errors import ConfigError, ShardError
from dryfit.settings.execution import PlanSubject
from dryfit.settings.memory_terms import Effect, MemoryCategory, OptimizerImpl, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.sharding import ShardPlan, ShardSummary
from dryfit.tasks.base import Batch
from dryfit.training.optimizer import make_optimizer
from dryfit.training.step import backward_batch
from dryfit.training.step_tracer import StepParts, StepTracer, step_parts, whole_model
from rank_plans import CPU, config, planned, subject, with_weights

ROWS, MICRO = 8, 3
EACH_DAY = (("bert", False), ("llama, words, bf16", False), ("bert, frozen", True))
WORDS: dict[str, Any] = {"vocab_size": 4608}
SUBJECTS: dict[str, Callable[[Path], PlanSubject]] = {
    "bert": lambda folder: subject(config(folder / "bert")),
    "bert, frozen": lambda folder: subject(config(folder / "bert"), regularization={"freeze_layers": 2}),
    "bert, bf16": lambda folder: subject(config(folder / "bert"), train={"precision": "bf16"}),
    "bert, many words": lambda folder: subject(config(folder / "many words", vocab_size=8192), train={"max_length": 8}),
    "evidence": lambda folder: subject(config(folder / "bert"), BuiltInTask.EVIDENCE),
    "llama": lambda folder: subject(config(folder / "llama", "llama"), BuiltInTask.CAUSAL_LM),
    "llama, adapters": lambda folder: subject(config(folder / "llama", "llama"), BuiltInTask.CAUSAL_LM, lora={"r": 4}),
    "llama, words": lambda folder: subject(
        config(folder / "words", "llama", **WORDS), BuiltInTask.CAUSAL_LM, lora={"r": 4}
    ),
    "llama, words, bf16": lambda folder: subject(
        config(folder / "words, tied", "llama", tie_word_embeddings=True, **WORDS),
        BuiltInTask.CAUSAL_LM,
        train={"precision": "bf16"},
        lm={"format": "both"},
    ),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and what was planned, proved and traced of them: each once, as in the cache of a study."""
    return tmp_path_factory.mktemp("kept")


@dataclass
class Counting:
    """Another rank's end, and what this one sends over it: rings, in fractions of bytes."""

    inner: Ranks
    in_backward: bool = False
    forward_bytes: Fraction = Fraction(0)
    backward_bytes: Fraction = Fraction(0)

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def degree(self) -> int:
        return self.inner.degree

    @property
    def own_generator(self) -> bool:
        return False

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        self._add(Fraction(2 * (self.degree - 1), self.degree) * tensor.numel() * tensor.element_size())
        return self.inner.all_reduce(tensor, what)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        self._add(Fraction((self.degree - 1) * tensor.numel() * tensor.element_size()))
        return self.inner.all_gather(tensor, what)

    def _add(self, size_bytes: Fraction) -> None:
        if self.in_backward:
            self.backward_bytes += size_bytes
        else:
            self.forward_bytes += size_bytes


@dataclass
class Held:
    """What a rank holds after a real step."""

    sent: Counting
    weights: int
    gradients: int
    state: int


def batch_of(sizes: dict[str, tuple[int, ...]]) -> Batch:
    """Rows without padding."""
    generator = torch.Generator().manual_seed(2)

    def entry(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if "mask" in name:
            return torch.ones(size, dtype=torch.long)
        if "type" in name:
            return torch.zeros(size, dtype=torch.long)
        if name == "position_ids":
            return torch.arange(size[-1]).expand(size).contiguous()
        return torch.randint(0, 2 if "label" in name else 8, size, generator=generator)

    return {name: entry(name, size) for name, size in sizes.items()}


def real_step(what: PlanSubject, parts: StepParts, plan: ShardPlan, ranks: SimulatedRanks) -> Held:
    """One optimizer step of a module with weights, really cut, beside the other ranks."""
    sent = Counting(ranks)
    model, layout = with_weights(parts.model), TensorParallel(plan, sent)
    layout.shard(model)
    parts = replace(parts, layout=layout).connected()
    model.train()
    length = what.settings.train.max_length
    batch = batch_of(parts.batch_sizes(ROWS, length))
    bf16 = what.settings.train.precision == "bf16"

    def backward(loss: torch.Tensor) -> None:
        sent.in_backward = True
        loss.backward()
        sent.in_backward = False

    backward_batch(
        model,
        batch,
        parts.task,
        micro_batch=MICRO,
        backward=backward,
        autocast=partial(torch.autocast, "cpu", torch.bfloat16) if bf16 else nullcontext,
    )
    gradients = sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
    optimizer = make_optimizer(model, what.settings.optim)
    optimizer.step()
    state = sum(value.nbytes for values in optimizer.state.values() for value in values.values())
    return Held(sent, sum(one.nbytes for one in model.parameters()), gradients, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        pytest.param(*one, marks=[] if one in EACH_DAY else pytest.mark.nightly)
        for one in [*((name, False) for name in SUBJECTS), ("bert", True), ("bert, frozen", True)]
    ],
)
def test_what_a_rank_holds_and_sends_is_what_it_really_holds_and_sends(
    name: str, checkpointing: bool, kept: Path
) -> None:
    what = SUBJECTS[name](kept)
    answer = planned(what, kept / "cache", tp=2, micro_batch=MICRO, checkpointing=checkpointing)
    assert answer.verdict is VerdictKind.FITS, answer.reasons
    assert answer.execution is not None and (answer.execution.micro_batch, answer.execution.accumulation) == (3, 3)
    plan = ShardPlans(kept / "cache" / sharding.PLANS_FOLDER, whole_model).plan(what, 2)
    in_chunks = bool(answer.execution.chunked_loss)
    assert in_chunks == name.startswith("llama")
    modules = [step_parts(what, checkpointing=checkpointing, reentrant=False, chunked_loss=in_chunks) for _ in range(2)]
    held = simulate(2, lambda ranks: real_step(what, modules[ranks.rank], plan, ranks))
    shard = of(answer)
    assert shard.sent is not None
    for rank in held:
        assert rank.weights == shard.weight_bytes < shard.whole_weight_bytes
        # A loss in chunks computes gradients in the forward pass; the plan counts them as what they are.
        early_bytes = rank.sent.forward_bytes - shard.sent.forward_bytes
        assert early_bytes >= 0 and (in_chunks or not early_bytes)
        assert shard.sent.backward_bytes == rank.sent.backward_bytes + early_bytes > 0
    tracer = StepTracer(what, CPU, plan=plan)
    variant, shape = Variant(checkpointing, chunked_loss=in_chunks), Shape(MICRO, what.settings.train.max_length)
    loaded = end_bytes(tracer.trace(SegmentKind.LOAD, variant, None), "weight:")
    buffers = sum(one.nbytes for one in step_parts(what, checkpointing=False, reentrant=False).model.buffers())
    assert loaded == held[0].weights + buffers
    assert end_bytes(tracer.trace(SegmentKind.MICRO_FIRST, variant, shape), "gradient:") == held[0].gradients
    assert end_bytes(tracer.trace(SegmentKind.UPDATE_FIRST, variant, None), "optimizer:") == held[0].state


@pytest.mark.slow
def test_scores_that_stay_sharded_take_less_and_send_less(kept: Path) -> None:
    what = subject(config(kept / "words", "llama", **WORDS), BuiltInTask.CAUSAL_LM)
    plan = ShardPlans(kept / "cache" / sharding.PLANS_FOLDER, whole_model).plan(what, 2)
    assert plan.scores == "decoder.lm_head"
    assert plan.vocabulary == WORDS["vocab_size"]
    shape, table_bytes = Shape(MICRO, 32), MICRO * 32 * WORDS["vocab_size"] * 4
    apart, together = (StepTracer(what, CPU, plan=one) for one in (plan, plan.model_copy(update={"scores": None})))
    for kind in (SegmentKind.MICRO_FIRST, SegmentKind.EVALUATE):
        found, put_together = (peak_bytes(one.trace(kind, Variant(), shape)) for one in (apart, together))
        assert found < put_together - table_bytes
    sent, before = (one.sent(Variant(), shape) for one in (apart, together))
    assert before.forward_bytes - sent.forward_bytes == table_bytes // 2 - MICRO * 32 * 3 * 4
    assert sent.backward_bytes == before.backward_bytes


def of(answer: PlanAnswer) -> ShardSummary:
    """How the model is sharded."""
    assert answer.sharding is not None
    return answer.sharding


def category(answer: PlanAnswer, name: MemoryCategory) -> int:
    """Bytes of a category at the peak."""
    return answer.memory.by_category.get(name, 0)


@pytest.mark.slow
def test_a_rank_takes_less_than_the_whole_and_neither_answers_for_the_other(tmp_path: Path) -> None:
    what = subject(config(tmp_path / "model", hidden_size=256, intermediate_size=1024, vocab_size=4096))
    answers = [planned(what, tmp_path / "cache", tp=tp) for tp in (1, 2, 4, 1, 2)]
    whole, two, four, *again = answers
    assert [one.memory for one in again] == [whole.memory, two.memory]
    peaks = [one.memory.peak_allocated_bytes for one in (whole, two, four) if one.memory is not None]
    assert peaks[0] > peaks[1] > peaks[2]
    assert peaks[1] < 2 / 3 * peaks[0] and peaks[2] < peaks[0] / 2
    assert whole.sharding is None
    assert [of(one).degree for one in (two, four)] == [2, 4]
    for one in (two, four):
        states = category(one, MemoryCategory.OPTIMIZER) / category(whole, MemoryCategory.OPTIMIZER)
        assert states == pytest.approx(of(one).weight_bytes / of(one).whole_weight_bytes, rel=0.01)


@pytest.mark.slow
def test_a_checkpoint_puts_whole_parameters_together(kept: Path) -> None:
    what = subject(config(kept / "many words", vocab_size=8192), train={"max_length": 8})
    table_bytes = 8192 * 64 * 4
    plan = ShardPlans(kept / "cache" / sharding.PLANS_FOLDER, whole_model).plan(what, 2)
    assert plan.parameters["encoder.embeddings.word_embeddings.weight"].dim == 0
    alone = StepTracer(what, CPU).trace(SegmentKind.SAVE, Variant(), None)
    rank = StepTracer(what, CPU, plan=plan).trace(SegmentKind.SAVE, Variant(), None)
    # Each rank's slice, and the whole made of them.
    assert table_bytes in rank.deltas
    assert 2 * table_bytes <= peak_bytes(rank)
    assert StepTracer(what, CPU).key != StepTracer(what, CPU, plan=plan).key
    assert peak_bytes(alone) <= peak_bytes(rank)


@pytest.mark.slow
def test_the_table_has_every_parameter_with_layers_folded(kept: Path) -> None:
    shard = of(planned(subject(config(kept / "bert")), kept / "cache", tp=2))
    rows = {row.name: row for row in shard.rows}
    assert sum(row.count for row in shard.rows) == shard.cut + shard.whole
    assert sum(row.count for row in shard.rows if row.shape != row.local_shape) == shard.cut
    query = rows["encoder.encoder.layer.*.attention.self.query.weight"]
    assert (query.count, query.shape, query.local_shape, query.how) == (3, (64, 64), (32, 64), "column")
    back = rows["encoder.encoder.layer.*.output.dense.weight"]
    assert (back.count, back.shape, back.local_shape, back.how) == (3, (64, 96), (64, 48), "row")
    assert rows["encoder.embeddings.LayerNorm.weight"].how == "whole"
    (whole,) = shard.kept_whole
    assert whole.reason == "sharding it would send more than it saves"
    assert "encoder.embeddings.word_embeddings.weight" in whole.names
    assert 0 <= shard.output_error < 1e-10 and 0 <= shard.gradient_error < 1e-8


@pytest.mark.parametrize(
    ("tables", "execution", "said"),
    [
        ({"optim": {"name": "adafactor"}}, {"tp": 2}, "adafactor computes with whole parameters"),
        ({"optim": {"name": "adamw8bit"}}, {"tp": 2}, "adamw8bit computes with whole parameters"),
        ({}, {"tp": 2, "offload_optimizer": True}, "each process has a part of it"),
        ({"train": {"precision": "fp16"}}, {"tp": 2}, "loss scale"),
        ({}, {"tp": 3}, "3 does not divide 4, the heads or features"),
    ],
)
def test_what_cannot_be_sharded_so_is_refused_before_anything_is_traced(
    tables: dict[str, Any], execution: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(subject(config(tmp_path / "model"), **tables), tmp_path / "cache", **execution)
    assert not list((tmp_path / "cache").glob("traces/*"))


def test_a_base_in_8_bits_is_not_sharded(tmp_path: Path) -> None:
    what = subject(config(tmp_path / "model", "llama"), BuiltInTask.CAUSAL_LM, lora={"r": 4, "base": "int8"})
    with pytest.raises(ConfigError, match='lora.base is "int8"'):
        planned(what, tmp_path / "cache", tp=2)
    assert not list((tmp_path / "cache").glob("traces/*"))


@pytest.mark.slow
def test_heads_of_keys_count_where_queries_share_them(tmp_path: Path) -> None:
    what = subject(config(tmp_path / "model", "llama"), BuiltInTask.CAUSAL_LM)
    with pytest.raises(ConfigError, match="4 does not divide 2") as refused:
        planned(what, tmp_path / "cache", tp=4)
    assert refused.value.allowed == "execution.tp of 2"
    assert "key and value heads" in refused.value.hint


@pytest.mark.slow
def test_a_plan_that_its_proof_refuses_is_not_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_sums_of_gradients(*args: Any) -> ShardPlan:
        found = shard_plan(*args)
        bare = {path: one.model_copy(update={"inputs": {}}) for path, one in found.modules.items()}
        return found.model_copy(update={"modules": bare})

    shard_plan = sharding.shard_plan
    monkeypatch.setattr(sharding, "shard_plan", without_sums_of_gradients)
    with pytest.raises(ShardError, match="proving a plan"):
        planned(subject(config(tmp_path / "model")), tmp_path / "cache", tp=2)
    assert not list((tmp_path / "cache").glob("*/*"))


def wide(folder: Path, **tables: Any) -> PlanSubject:
    """Its weights are nearly all that it takes."""
    shape = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192, "num_hidden_layers": 2}
    return subject(config(folder, **shape), train={"batch_size": 2, "max_length": 8}, **tables)


@pytest.mark.slow
def test_more_devices_are_the_last_fallbacks_and_a_refusal_names_the_fewest(kept: Path) -> None:
    what, cache = wide(kept / "wide"), kept / "cache"
    planned_so = partial(planned, what, cache, micro_batch=2, optimizer_impl=OptimizerImpl.FUSED)
    free = planned_so(every_fallback=True)
    assert free.verdict is VerdictKind.FITS and free.sharding is None and not free.cannot_shard
    *others, two, four = free.ladder
    assert (two.change, two.devices, two.note) == ("execution.tp = 2", 2, "on each of 2 devices")
    assert (four.change, four.devices) == ("execution.tp = 4", 4)
    assert {fallback.devices for fallback in others} == {1}
    assert two.effect is four.effect is Effect.NUMERICS
    assert two.execution is four.execution is None
    asked = planned_so(tp=2)
    assert two.required_bytes == asked.memory.required_bytes
    assert two.saves_bytes == free.memory.required_bytes - two.required_bytes > 0
    assert (
        min(fallback.required_bytes for fallback in others if fallback.execution)
        > two.required_bytes
        > four.required_bytes
    )
    for fallback in (two, four):
        device = CPU.model_copy(update={"capacity_bytes": fallback.required_bytes})
        tight = planned_so(device=device, every_fallback=True)
        assert tight.verdict is VerdictKind.REFUSED and tight.execution is None
        assert [one.fits for one in tight.ladder[-2:]] == [fallback is two, True]
        assert tight.reasons[-1].startswith(f"{fallback.change} would fit: ")
        assert "on each of" in tight.reasons[-1]


@pytest.mark.slow
@pytest.mark.nightly
def test_where_a_degree_is_set_only_larger_ones_are_fallbacks(kept: Path) -> None:
    what = subject(config(kept / "bert"))
    nothing = CPU.model_copy(update={"capacity_bytes": 1})
    found = planned(what, kept / "cache", tp=2, every_fallback=True, device=nothing, checkpointing=False)
    assert found.verdict is VerdictKind.REFUSED
    assert [fallback.change for fallback in found.ladder if fallback.devices > 1] == ["execution.tp = 4"]
    assert not any("8-bit" in fallback.change or "host" in fallback.change for fallback in found.ladder)
    assert found.ladder[-1].note == "on each of 4 devices; with micro-batch 8 -> 1, accumulate 8"
    assert not any("would fit" in reason for reason in found.reasons)
    divided = planned(what, kept / "cache", dp=2, every_fallback=True, micro_batch=8, checkpointing=False)
    assert divided.verdict is VerdictKind.UNKNOWN and "execution.dp is 2" in divided.reasons[0]
    assert not divided.ladder and divided.sharding is None and not divided.cannot_shard
