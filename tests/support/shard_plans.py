"""Plans written by hand, and tiny models for them."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from dryfit.meta import build
from dryfit.settings.sharding import Boundary, ModuleShard, ParameterShard, ShardPlan

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
COPY, REDUCE, GATHER = Boundary.COPY, Boundary.REDUCE, Boundary.GATHER


def config(kind: str, **changes: Any) -> Any:
    """A tiny config."""
    own: dict[str, dict[str, Any]] = {
        "bert": {},
        "llama": {"num_key_value_heads": 4, "use_cache": False},
        "mixtral": {
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "use_cache": False,
        },
        "gpt2": {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2},
    }
    return AutoConfig.for_model(kind, **{**SIZES, **own[kind], **changes})


def on_meta(kind: str, **changes: Any) -> nn.Module:
    """A tiny model without weights."""
    of = config(kind, **changes)
    make = AutoModelForSequenceClassification if kind == "bert" else AutoModelForCausalLM
    return build(lambda: make.from_config(of))


def batch(rows: int = 3, length: int = 7, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of rows of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SIZES["vocab_size"], (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


class PlanBuilder:
    """Rows for a module's parameters; those not named stay whole."""

    def __init__(self, module: nn.Module, degree: int) -> None:
        self.degree = degree
        self.rows: dict[str, ParameterShard] = {}
        self.modules: dict[str, ModuleShard] = {}
        first: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            tied = first.setdefault(id(parameter), name)
            self.rows[name] = ParameterShard(shape=tuple(parameter.shape), tied_to=tied if tied != name else None)

    def shard(self, name: str, dim: int, *, blocks: int = 1, unit: int = 1) -> None:
        """Cut a parameter, if there is one of this name."""
        if name in self.rows:
            shape = self.rows[name].shape
            equal = (shape[dim] // blocks,) * blocks
            self.rows[name] = ParameterShard(
                shape=shape, dim=dim, blocks=equal, unit=unit, tied_to=self.rows[name].tied_to
            )

    def column(self, path: str, *, unit: int = 1) -> None:
        """Cut a Linear's outputs."""
        self.shard(f"{path}.weight", 0, unit=unit)
        self.shard(f"{path}.bias", 0, unit=unit)

    def row(self, path: str, *, unit: int = 1) -> None:
        """Cut a Linear's inputs and sum what comes out."""
        self.shard(f"{path}.weight", 1, unit=unit)
        self.modules[path] = ModuleShard(outputs={"0": REDUCE}, bias_after=f"{path}.bias" in self.rows)

    def plan(self) -> ShardPlan:
        """All of it."""
        return ShardPlan(degree=self.degree, parameters=self.rows, modules=self.modules)


def bert_plan(module: nn.Module, degree: int, *, vocabulary: bool = False) -> ShardPlan:
    """Heads and intermediate features sharded, as Megatron does."""
    made = PlanBuilder(module, degree)
    unit = module.config.hidden_size // module.config.num_attention_heads  # pyright: ignore
    for path, part in module.named_modules():
        match type(part).__name__:
            case "BertSelfAttention":
                made.modules[path] = ModuleShard(inputs={"hidden_states": COPY})
                for name in ("query", "key", "value"):
                    made.column(f"{path}.{name}", unit=unit)
                made.row(path.removesuffix("self") + "output.dense", unit=unit)
            case "BertIntermediate":
                made.modules[path] = ModuleShard(inputs={"hidden_states": COPY})
                made.column(f"{path}.dense")
                made.row(path.removesuffix("intermediate") + "output.dense")
            case "BertEmbeddings" if vocabulary:
                made.shard(f"{path}.word_embeddings.weight", 0)
                made.modules[f"{path}.word_embeddings"] = ModuleShard(vocabulary=True, outputs={"0": REDUCE})
    return made.plan()


def llama_plan(module: nn.Module, degree: int, *, vocabulary: bool = False) -> ShardPlan:
    """Heads and intermediate features sharded; with ``vocabulary`` the table of words and the head too."""
    made = PlanBuilder(module, degree)
    unit = module.config.hidden_size // module.config.num_attention_heads  # pyright: ignore
    for path, part in module.named_modules():
        match type(part).__name__:
            case "LlamaAttention":
                made.modules[path] = ModuleShard(inputs={"hidden_states": COPY})
                for name in ("q_proj", "k_proj", "v_proj"):
                    made.column(f"{path}.{name}", unit=unit)
                made.row(f"{path}.o_proj", unit=unit)
            case "LlamaMLP":
                made.modules[path] = ModuleShard(inputs={"x": COPY})
                made.column(f"{path}.gate_proj")
                made.column(f"{path}.up_proj")
                made.row(f"{path}.down_proj")
    if vocabulary:
        made.shard("model.embed_tokens.weight", 0)
        made.modules["model.embed_tokens"] = ModuleShard(vocabulary=True, outputs={"0": REDUCE})
        made.shard("lm_head.weight", 0)
        made.modules["lm_head"] = ModuleShard(inputs={"input": COPY}, outputs={"0": GATHER})
    return made.plan()


def mixtral_plan(module: nn.Module, degree: int) -> ShardPlan:
    """The features of each expert sharded: gate and up in one weight of three dimensions."""
    made = PlanBuilder(module, degree)
    for path, part in module.named_modules():
        if type(part).__name__ == "MixtralExperts":
            made.shard(f"{path}.gate_up_proj", 1, blocks=2)
            made.shard(f"{path}.down_proj", 2)
            made.modules[path] = ModuleShard(
                inputs={"hidden_states": COPY, "top_k_weights": COPY}, outputs={"0": REDUCE}
            )
    return made.plan()


def gpt2_plan(module: nn.Module, degree: int) -> ShardPlan:
    """Fused queries, keys and values, sharded in three blocks; weights are transposed."""
    made = PlanBuilder(module, degree)
    of = module.config  # pyright: ignore
    unit = of.hidden_size // of.num_attention_heads  # pyright: ignore
    for path, part in module.named_modules():
        match type(part).__name__:
            case "GPT2Attention":
                made.modules[path] = ModuleShard(
                    inputs={"hidden_states": COPY}, attributes={"split_size": of.hidden_size // degree}
                )
                for name, dim in (("weight", 1), ("bias", 0)):
                    made.shard(f"{path}.c_attn.{name}", dim, blocks=3, unit=unit)
                _conv_rows(made, f"{path}.c_proj", unit)
            case "GPT2MLP":
                made.modules[path] = ModuleShard(inputs={"hidden_states": COPY})
                made.shard(f"{path}.c_fc.weight", 1)
                made.shard(f"{path}.c_fc.bias", 0)
                _conv_rows(made, f"{path}.c_proj", 1)
    return made.plan()


def _conv_rows(made: PlanBuilder, path: str, unit: int) -> None:
    made.shard(f"{path}.weight", 0, unit=unit)
    made.modules[path] = ModuleShard(outputs={"0": REDUCE}, bias_after=True)
