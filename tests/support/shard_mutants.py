"""Wrong plans of a Llama with two layers, each wrong in one way."""

from collections.abc import Callable, Iterator
from typing import Any

from dryfit.settings.sharding import Boundary, ModuleShard, ParameterShard, ShardPlan

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"


class OffByOne(ParameterShard):
    """Slices that begin one too far along, and wrap around."""

    def slices(self, rank: int, degree: int) -> Iterator[tuple[int, int]]:
        """One too far, but for the last rank's."""
        for begin, end in super().slices(rank, degree):
            last = rank == degree - 1
            yield (begin, end) if last else (begin + 1, end + 1)


def changed_module(plan: ShardPlan, path: str, **changes: Any) -> ShardPlan:
    """Another row for a module."""
    row = plan.modules.get(path, ModuleShard()).model_copy(update=changes)
    return plan.model_copy(update={"modules": {**plan.modules, path: row}})


def changed_parameter(plan: ShardPlan, name: str, **changes: Any) -> ShardPlan:
    """Another row for a parameter."""
    row = plan.parameters[name].model_copy(update=changes)
    return plan.model_copy(update={"parameters": {**plan.parameters, name: row}})


def changed_blocks(plan: ShardPlan, name: str, *quarters: int) -> ShardPlan:
    """Cut along the dimension that is sharded, in other blocks."""
    shape, dim = plan.parameters[name].shape, plan.parameters[name].dim
    assert dim is not None
    return changed_parameter(plan, name, blocks=tuple(shape[dim] // 4 * part for part in quarters), unit=1)


def off_by_one(plan: ShardPlan, name: str) -> ShardPlan:
    """Slices of a parameter that begin one too far along."""
    row = OffByOne.model_validate(plan.parameters[name].model_dump())
    return plan.model_copy(update={"parameters": {**plan.parameters, name: row}})


def swapped(plan: ShardPlan, *names: str) -> ShardPlan:
    """Parameters sharded in their other dimension."""
    for name in names:
        shape, dim = plan.parameters[name].shape, plan.parameters[name].dim
        assert dim is not None
        plan = changed_parameter(plan, name, dim=1 - dim, blocks=(shape[1 - dim],), unit=1)
    return plan


# Of a plan by ``shard_plans.llama_plan`` with the vocabulary sharded: what is wrong with it, and what the prover says.
MUTANTS: dict[str, tuple[Callable[[ShardPlan], ShardPlan], str]] = {
    "row and column swapped in the MLP": (
        lambda plan: swapped(plan, *(f"{MLP}.{name}_proj.weight" for name in ("gate", "up", "down"))),
        rf"{MLP}.\w+ fails on a rank's slices",
    ),
    "row and column swapped in attention": (
        lambda plan: swapped(plan, *(f"{ATTENTION}.{name}_proj.weight" for name in "qkvo")),
        rf"{ATTENTION}.\w+ fails on a rank's slices",
    ),
    "row and column of a square weight swapped": (
        lambda plan: swapped(plan, f"{ATTENTION}.o_proj.weight"),
        rf"{ATTENTION}.o_proj fails",
    ),
    "a sum dropped behind attention": (
        lambda plan: changed_module(plan, f"{ATTENTION}.o_proj", outputs={}),
        f"{ATTENTION}.o_proj's output is off",
    ),
    "a sum dropped behind the MLP": (
        lambda plan: changed_module(plan, f"{MLP}.down_proj", outputs={}),
        f"{MLP}.down_proj's output is off",
    ),
    "a sum twice": (
        lambda plan: changed_module(plan, MLP, outputs={"0": Boundary.REDUCE}),
        f"{MLP}'s output is off",
    ),
    "a sum of gradients dropped before attention": (
        lambda plan: changed_module(plan, ATTENTION, inputs={}),
        r"gradient of model\.layers\.1\.input_layernorm\.weight is off",
    ),
    "a sum of gradients dropped before the MLP": (
        lambda plan: changed_module(plan, MLP, inputs={}),
        r"gradient of model\.layers\.1\.post_attention_layernorm\.weight is off",
    ),
    "a sum of gradients too many": (
        lambda plan: changed_parameter(plan, "model.layers.1.input_layernorm.weight", sum_gradient=True),
        r"gradient of model\.layers\.1\.input_layernorm\.weight is off",
    ),
    "heads of queries split in halves": (
        lambda plan: changed_blocks(plan, f"{ATTENTION}.q_proj.weight", 2, 2),
        f"{ATTENTION}.o_proj's output is off",
    ),
    "heads of values in another order": (
        lambda plan: changed_blocks(plan, f"{ATTENTION}.v_proj.weight", 1, 3),
        f"{ATTENTION}.o_proj's output is off",
    ),
    "gate and up sharded differently": (
        lambda plan: changed_blocks(plan, f"{MLP}.gate_proj.weight", 2, 2),
        f"{MLP}.down_proj's output is off",
    ),
    "a slice of queries off by one": (
        lambda plan: off_by_one(plan, f"{ATTENTION}.q_proj.weight"),
        f"{ATTENTION}.o_proj's output is off",
    ),
    "a slice of the last weight off by one": (
        lambda plan: off_by_one(plan, f"{MLP}.down_proj.weight"),
        f"{MLP}.down_proj's output is off",
    ),
    "rows of the vocabulary off by one": (
        lambda plan: off_by_one(plan, "model.embed_tokens.weight"),
        r"model\.embed_tokens's output is off",
    ),
    "ids of other ranks' rows not left out": (
        lambda plan: changed_module(plan, "model.embed_tokens", vocabulary=False),
        r"model\.embed_tokens fails on a rank's slices",
    ),
    "the head's slices not put together": (
        lambda plan: changed_module(plan, "lm_head", outputs={}),
        "the output is off by inf",
    ),
    "the head's slices put together, its input's gradients not summed": (
        lambda plan: changed_module(plan, "lm_head", inputs={}),
        r"gradient of model\.norm\.weight is off",
    ),
}
