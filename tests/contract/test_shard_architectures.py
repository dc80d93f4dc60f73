"""Every architecture, planned from its trace and proved: outputs, gradients and parameters after some steps.

The proof's own ranks are threads of this process; others here are processes, which read their slices from files.
"""

import re
from itertools import product
from typing import Any

import pytest
from torch import nn

import rank_groups
from dryfit.parallel.planner import plan_shards
from dryfit.parallel.prove import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, PARAMETER_TOLERANCE, prove
from dryfit.settings.errors import ConfigError
from dryfit.settings.sharding import ShardPlan
from rank_architectures import ARCHITECTURES, Whole, batch, cases, compare, model, on_meta, planned, saved_whole
from rank_groups import ERROR, Facts

pytestmark = pytest.mark.slow

OWN_TOLERANCE = 1e-6  # of a gradient, relative to the parameter's own largest
DEGREES = (2, 4)


def sharded_in_layers(plan: ShardPlan) -> set[str]:
    return {name for name, shard in plan.parameters.items() if shard.dim is not None and re.search(r"\.\d+\.", name)}


def checked_plan(name: str, degree: int, *, words: bool) -> ShardPlan:
    plan = planned(name, degree, words=words)
    assert len(sharded_in_layers(plan)) == 2 * ARCHITECTURES[name][2]
    assert any(row.vocabulary for row in plan.modules.values()) is words
    assert ShardPlan.model_validate_json(plan.model_dump_json()) == plan
    return plan


@pytest.mark.every(4)
@pytest.mark.parametrize("words", [False, True], ids=["layers", "words too"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_planned_and_proved_on_two_ranks(name: str, words: bool) -> None:
    prove(model(name), checked_plan(name, 2, words=words), batch(name))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_four_ranks_need_four_heads_of_keys(name: str) -> None:
    with pytest.raises(ConfigError, match="4 does not divide 2"):
        plan_shards(on_meta(name, num_key_value_heads=2), 4, tokens=10**6)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_layers_are_sharded_as_transformers_own_plan_does(name: str) -> None:
    module: Any = model(name)
    theirs: dict[str, str] = module.config.base_model_tp_plan
    plan = planned(name, 2, words=False)
    dims = {"colwise": 0, "rowwise": 1}
    seen = set()
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear) and path.startswith("model.layers."):
            style = theirs[re.sub(r"\d+", "*", path.removeprefix("model."))]
            seen.add(style)
            assert plan.parameters[f"{path}.weight"].dim == dims[style], path
    assert seen == set(dims)


# --- on real processes, from files -----------------------------------------------------------------------------------

EACH_DAY = (("bert", 2), ("llama", 4), ("mixtral", 2))
"""An encoder, heads that share keys, and experts; of each architecture the plan is proved above."""
WITHOUT_A_SUM = "bert, one sum left out"


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    folder = tmp_path_factory.mktemp("models")
    return {name: saved_whole(name, folder / name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def found(
    wholes: dict[str, Whole], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[int, dict[str, list[Facts]]]:
    """What each rank found, by degree and architecture: a group of two and one of four do all that are asked for."""
    asked = [
        item.callspec.params
        for item in request.session.items
        if item.nodeid.startswith(request.node.nodeid) and hasattr(item, "callspec")
    ]
    folder = tmp_path_factory.mktemp("ranks")
    done = {}
    for degree in DEGREES:
        plan = planned("bert", degree, words=True)
        path = "bert.encoder.layer.1.output.dense"
        wrong = plan.model_copy(update={"modules": {key: row for key, row in plan.modules.items() if key != path}})
        mutant = {WITHOUT_A_SUM: lambda ranks, wrong=wrong: compare(wholes["bert"], wrong, ranks)}
        names = {params["name"] for params in asked if params.get("degree") == degree and "name" in params}
        some = {name: whole for name, whole in wholes.items() if name in names}
        done[degree] = rank_groups.run(degree, folder / str(degree), cases(some, degree) | mutant)
    return done


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        pytest.param(name, degree, marks=[] if (name, degree) in EACH_DAY else pytest.mark.nightly)
        for name, degree in product(ARCHITECTURES, DEGREES)
    ],
)
def test_processes_that_load_slices_train_as_the_whole(
    found: dict[int, dict[str, list[Facts]]], name: str, degree: int
) -> None:
    assert checked_plan(name, degree, words=True).degree == len(found[degree][name]) == degree
    for rank, facts in enumerate(found[degree][name]):
        assert ERROR not in facts, f"rank {rank}: {facts[ERROR]}"
        assert facts["logits"] <= OUTPUT_TOLERANCE, f"rank {rank}"
        for what, most in (
            ("gradients", GRADIENT_TOLERANCE),
            ("own gradients", OWN_TOLERANCE),
            ("trained", PARAMETER_TOLERANCE),
            *([("put together", PARAMETER_TOLERANCE)] if rank == 0 else []),
        ):
            parameter, off = facts[what]
            assert off <= most, f"rank {rank}: {what}, {parameter}"
        assert facts["slices"] <= facts["read"] <= 1.01 * facts["slices"], f"rank {rank}"


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_processes_see_a_sum_that_is_left_out(found: dict[int, dict[str, list[Facts]]], degree: int) -> None:
    for facts in found[degree][WITHOUT_A_SUM]:
        assert facts["logits"] > 1e-3 and facts["gradients"][1] > 1e-3 and facts["trained"][1] > 1e-3
