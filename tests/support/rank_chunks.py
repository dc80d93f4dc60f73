"""What a rank finds of a loss in chunks of tokens: whether it is the whole model's loss of all scores."""

import copy
import warnings
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from dryfit.parallel.apply import shards_of, slice_tensor
from dryfit.parallel.collectives import ProcessRanks
from dryfit.parallel.proved_plans import shard_plan
from dryfit.parallel.tensor_parallel import TensorParallel
from dryfit.settings.sharding import ShardPlan
from dryfit.settings.tables import DataSettings, TrialSettings
from dryfit.tasks import causal_lm
from dryfit.tasks.base import Batch, Task, TaskContext
from dryfit.tasks.causal_lm import CausalLm, CausalLmTask
from dryfit.tasks.prompts import Example, PromptPart, sequences
from dryfit.tasks.tokens import TokenFacts
from dryfit.training.model import loss_in_chunks
from dryfit.training.step import backward_batch

WORDS = 4608
"""So many that their scores are worth sharding."""

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "vocab_size": WORDS,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, whole head": ("llama", {"vocab_size": 299}),
    "gemma2, tied and capped": ("gemma2", {"final_logit_softcapping": 0.5, "tie_word_embeddings": True}),
    "qwen2, adapters": ("qwen2", {}),
}


@cache
def planned(name: str, degree: int) -> ShardPlan:
    """How a model is sharded; called before the ranks are forked, none of them has to find out."""
    return shard_plan(_model(name), _task(), degree)


def _task() -> CausalLmTask:
    return CausalLmTask(TaskContext(TrialSettings(), DataSettings(), TokenFacts(pad_id=1)))


def of_model(name: str, ranks: ProcessRanks) -> dict[str, Any]:
    """Loss and gradients in fp64 of the whole model, and in chunks over the ranks: what they are off by."""
    causal_lm.chunk_tokens = lambda _: 13
    model, task = _model(name), _task()
    batch = _batch(task)
    wanted, expected = _step(copy.deepcopy(model), task, batch)
    largest = max(float(one.abs().max()) for one in expected.values())
    plan = planned(name, ranks.degree)
    part = TensorParallel(plan, ranks)
    part.shard(model)
    part.connect(model)
    task = loss_in_chunks(part.task_here(task), model)
    shards = shards_of(model, plan)
    off: dict[str, Any] = {"stay": plan.scores is not None}
    # Of fp64 autocast changes nothing, but in fp16 gradients are computed in the backward pass.
    for way, dtype in (("forward", None), ("backward", torch.float16)):
        found, gradients = _step(model, task, batch, dtype)
        assert gradients.keys() == expected.keys()
        own = {name: slice_tensor(one, shards[name], ranks.rank, ranks.degree) for name, one in expected.items()}
        worst = max(float((gradients[name] - own[name]).abs().max()) for name in own)
        off[way] = max(abs(found / wanted - 1), worst / largest)
        with torch.inference_mode():
            kept = task.keep(model(**{key: batch[key] for key in task.inputs if key in batch}), batch)
        off[f"{way}: validated"] = abs(float(kept[:, 0].sum()) / wanted - 1)
    return off


def _model(name: str) -> CausalLm:
    kind, own = MODELS[name]
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **own})).double()
    if "adapters" in name:
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT's business
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return CausalLm(model.double())


def _batch(task: Task) -> Batch:
    draw = torch.Generator().manual_seed(5)
    found: list[Example] = []
    for number in range(7):
        ids = tuple(torch.randint(2, 299, (5 + 3 * number,), generator=draw).tolist())
        found.append(Example(f"e{number}", ids, 2, PromptPart.CRITERIA))
    tokens = sequences(found, None)
    return task.collate(tokens, range(len(tokens)))


def _step(
    model: CausalLm, task: Task, batch: Batch, dtype: torch.dtype | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    model.train().zero_grad()
    autocast = nullcontext if dtype is None else lambda: torch.autocast("cpu", dtype)
    loss = backward_batch(model, batch, task, micro_batch=7, backward=lambda value: value.backward(), autocast=autocast)
    total = float(loss) * float(task.batch_weight(batch))
    return total, {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
