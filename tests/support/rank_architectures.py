"""A tiny model of each architecture: whole, planned, saved, and compared with itself cut over real processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedModel

import reads
from dryfit.meta import build
from dryfit.parallel import planner
from dryfit.parallel.apply import shards_of, slice_tensor
from dryfit.parallel.capture import SMALL, Inputs, capture
from dryfit.parallel.collectives import ProcessRanks
from dryfit.parallel.graph import Graph
from dryfit.parallel.planner import plan_shards
from dryfit.parallel.prove import InDouble
from dryfit.settings.sharding import ShardPlan
from loading import config_of
from rank_groups import Facts
from rank_loading import LoadedRank

AUTO: dict[str, Any] = {
    "masked-lm": AutoModelForMaskedLM,
    "causal-lm": AutoModelForCausalLM,
    "seq2seq-lm": AutoModelForSeq2SeqLM,
}
KV = {"num_key_value_heads": 4}
WORDS = 256
WIDE = {"vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
"""So wide that names and places in a file's header are less than a hundredth of a fourth of the weights; with so many
words that to cut them saves more than it sends."""
# Task, settings, and how many parameters of a layer are cut.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], int]] = {
    "bert": ("masked-lm", {}, 10),
    "roberta": ("masked-lm", {}, 10),
    "electra": ("masked-lm", {"embedding_size": 64}, 10),
    "distilbert": ("masked-lm", {"dim": 128, "n_layers": 2, "n_heads": 8, "hidden_dim": 256}, 10),
    "deberta-v2": (
        "masked-lm",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        14,
    ),
    "modernbert": ("masked-lm", {"cls_token_id": 1, "sep_token_id": 2}, 4),
    "gpt2": ("causal-lm", {"n_embd": 128, "n_layer": 2, "n_head": 8, "n_positions": 64}, 6),
    "llama": ("causal-lm", {**KV, "tie_word_embeddings": True}, 7),
    "mistral": ("causal-lm", KV, 7),
    "qwen2": ("causal-lm", {**KV, "tie_word_embeddings": True}, 10),
    "gemma2": ("causal-lm", {**KV, "head_dim": 16}, 7),
    "mixtral": ("causal-lm", {**KV, "num_local_experts": 4, "num_experts_per_tok": 2}, 6),
    "t5": ("seq2seq-lm", {"d_model": 128, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 8}, 17),
}
STEPS: Final = 3
_EPSILON: Final = 1e-2  # of AdamW, beside gradients of 1 at most: it must not divide rounding by rounding


def config(name: str, **changes: Any) -> Any:
    """A tiny config."""
    return config_of(name, **{**WIDE, **ARCHITECTURES[name][1], **changes})


def on_meta(name: str, **changes: Any) -> nn.Module:
    """A tiny model without weights."""
    auto = AUTO[ARCHITECTURES[name][0]]
    return build(lambda: auto.from_config(config(name, **changes), attn_implementation="eager"))


def batch(name: str) -> dict[str, Any]:
    """Three rows, one of them shorter."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, WORDS, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    task = ARCHITECTURES[name][0]
    if task == "seq2seq-lm":
        given["decoder_input_ids"] = torch.randint(5, WORDS, (3, 6), generator=generator)
    return given if task == "masked-lm" else {**given, "use_cache": False}


# --- plans: each model is followed once ------------------------------------------------------------------------------

_followed = cache(capture)


def _capture(module: nn.Module, inputs: Inputs | None = None, size: tuple[int, int] = SMALL) -> Graph:
    assert inputs is None
    return _followed(module, None, size)


@cache
def model(name: str) -> nn.Module:
    """A tiny model without weights, for planning: always the same one."""
    return on_meta(name)


@cache
def planned(name: str, degree: int, *, words: bool) -> ShardPlan:
    """How it is sharded over ranks, with its vocabulary or without."""
    with mock.patch.object(planner, "capture", _capture):
        return plan_shards(model(name), degree, tokens=1 if words else 10**6)


# --- on real processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Whole:
    """What a model does in one process.

    Attributes:
        name: Of the architecture.
        folder: Where it was saved, in fp64.
        logits: Of :func:`batch`.
        gradients: By parameter.
        largest: The largest of all gradients.
        trained: Its state after some optimizer steps.
    """

    name: str
    folder: Path
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]
    largest: float
    trained: dict[str, torch.Tensor]


def saved_whole(name: str, folder: Path) -> Whole:
    """Save a model with weights that are not small, and find out what it does."""
    auto = AUTO[ARCHITECTURES[name][0]]
    torch.manual_seed(7)
    made = auto.from_config(config(name), attn_implementation="eager").double()
    with torch.no_grad():
        for parameter in made.parameters():
            spread = 0.5 if parameter.ndim < 2 else 2 / parameter.shape[-1] ** 0.5
            parameter.add_(spread * torch.randn_like(parameter))
    made.save_pretrained(folder)
    with _ready(made):
        logits = made(**batch(name)).logits
        _loss(logits).backward()
        gradients = {key: parameter.grad.clone() for key, parameter in made.named_parameters()}
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        _train(made, name, largest)
    return Whole(name, folder, logits.detach(), gradients, largest, made.state_dict())


@contextmanager
def _ready(module: PreTrainedModel) -> Iterator[None]:
    """In double precision, tables included, without dropout; experts one by one (their kernel knows no fp64)."""
    module.eval()
    for buffer in module.buffers():
        buffer.data = buffer.data.double() if buffer.is_floating_point() else buffer.data
    if module._can_set_experts_implementation():
        module.set_experts_implementation("eager")
    with InDouble():
        yield


def _loss(logits: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (logits * weights).sum()


def _train(module: Any, name: str, largest: float) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=_EPSILON)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (_loss(module(**batch(name)).logits) / largest).backward()
        optimizer.step()


def compare(whole: Whole, plan: ShardPlan, ranks: ProcessRanks) -> Facts:
    """Load a rank's slices, compute and train with the others, and compare with the whole.

    Returns:
        The bytes that were read, and those of the slices; how far off the logits are; of the parameter that is most
        so, by name, how far its gradient is off, of all gradients' largest and of its own, and its value after the
        steps, here and, on rank 0, put together from all ranks.
    """
    with reads.counted() as read:
        loaded = LoadedRank(lambda: on_meta(whole.name), plan, whole.folder, ranks, dtype=torch.float64)
    module = loaded.connected()
    facts: Facts = {"read": read.all_bytes(), "slices": sum(one.nbytes for one in module.parameters())}
    shards = shards_of(module, plan)

    def local(key: str, tensor: torch.Tensor) -> torch.Tensor:
        return slice_tensor(tensor, shards[key], ranks.rank, plan.degree) if key in shards else tensor

    with _ready(module):
        logits = module(**batch(whole.name)).logits
        facts["logits"] = _off(logits, whole.logits) / max(1.0, _largest(whole.logits))
        _loss(logits).backward()
        off = {key: _off(one.grad, local(key, whole.gradients[key])) for key, one in module.named_parameters()}
        own = {key: whole.largest * 1e-6 + _largest(whole.gradients[key]) for key in off}
        facts["gradients"] = _worst({key: value / whole.largest for key, value in off.items()})
        facts["own gradients"] = _worst({key: value / own[key] for key, value in off.items()})
        _train(module, whole.name, whole.largest)
    here = {key: _off(one, local(key, whole.trained[key])) for key, one in module.named_parameters()}
    together = loaded.whole_state()
    facts["trained"] = _worst(here)
    if ranks.rank == 0:
        facts["put together"] = _worst({key: _off(together[key], one) for key, one in whole.trained.items()})
    return facts


def cases(wholes: dict[str, Whole], degree: int) -> dict[str, Any]:
    """What each architecture's ranks do, for :func:`rank_groups.run`."""
    return {name: partial(compare, whole, planned(name, degree, words=True)) for name, whole in wholes.items()}


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max())


def _off(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    """Largest difference; infinite where there is nothing to compare, or no number."""
    if found is None or found.shape != expected.shape:
        return float("inf")
    return float((found - expected).detach().abs().nan_to_num(nan=float("inf")).max())


def _worst(off: dict[str, float]) -> tuple[str, float]:
    return max(off.items(), key=lambda one: one[1])
