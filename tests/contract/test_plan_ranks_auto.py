"""``execution.tp = "auto"`` with the real planner: what is sharded, over how many ranks, and what a refusal says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dryfit.documents.plans import headline
from dryfit.parallel import proved_plans as sharding
from dryfit.settings.execution import PlanSubject
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.study.trial_plans import refusal_text
from rank_plans import CPU, config, planned, subject

MB = 1_000_000
FEW: dict[str, Any] = {"optimizer_impl": "fused", "micro_batch": 2}
"""Wishes that leave little to try."""


def wide(folder: Path, **tables: Any) -> PlanSubject:
    """Its weights are nearly all that it takes."""
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192, "num_hidden_layers": 2}
    return subject(config(folder, **shape), train={"batch_size": 2, "max_length": 8}, **tables)


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., PlanAnswer]:
    """Plans on a device that lacks so many bytes of what the model takes on one."""
    what = wide(tmp_path / "model")
    free = planned(what, tmp_path / "cache", **FEW)
    needs = free.memory.required_bytes

    def answer(lacks: int, *, what: PlanSubject = what, **more: Any) -> PlanAnswer:
        device = CPU.model_copy(update={"capacity_bytes": needs - lacks})
        return planned(what, tmp_path / "cache", device=device, **(FEW | more))

    return answer


@pytest.mark.slow
def test_a_refusal_names_the_fewest_devices_for_one_trace_each_and_no_proof(
    ask: Callable[..., PlanAnswer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "_proved", lambda *_: pytest.fail("a proof was paid for"))
    cut = list[int]()
    plan_shards = sharding.plan_shards

    def counted(model: Any, degree: int, **known: Any) -> Any:
        cut.append(degree)
        return plan_shards(model, degree, **known)

    monkeypatch.setattr(sharding, "plan_shards", counted)
    for execution in ({}, {"tp": "auto"}):
        refused = ask(20 * MB, **execution)
        assert refused.verdict is VerdictKind.REFUSED and refused.execution is None and refused.sharding is None
        (two,) = [fallback for fallback in refused.ladder if fallback.devices > 1]
        assert (two.change, two.fits, two.execution) == ("execution.tp = 2", True, None)
        assert "would fit: execution.tp = 2 (" in refusal_text(refused)
        assert refused.reasons[-1].startswith("execution.tp = 2 would fit: ")
    assert cut == [2], "and followed once: the plan is kept"
    free = ask(0)
    assert free.verdict is VerdictKind.FITS and all(fallback.devices == 1 for fallback in free.ladder)


@pytest.mark.slow
def test_the_fewest_ranks_are_taken_and_what_fits_is_not_sharded(ask: Callable[..., PlanAnswer]) -> None:
    one = ask(0, tp="auto", degrees=(2, 4))
    assert one.verdict is VerdictKind.FITS and one.devices == 1 and one.sharding is None
    assert one.execution is not None and one.execution.tp is None
    assert [choice.tp for choice in one.fallbacks][-1] == 2, "the last thing to fall back to"
    two = ask(20 * MB, tp="auto", degrees=(2, 4))
    fixed = ask(20 * MB, tp=2)
    assert two.verdict is VerdictKind.FITS_WITH and two.devices == 2
    assert two.sharding == fixed.sharding and two.memory == fixed.memory
    assert two.execution is not None and fixed.execution is not None
    assert two.execution == fixed.execution.model_copy(update={"tp": 2})
    assert headline(two).startswith("plan fits with tensor parallelism over 2 ranks, micro-batch 2 x 1")
    assert " on each of 2 devices, device has " in headline(two)
    assert [choice.tp for choice in two.fallbacks] == [2] * len(fixed.fallbacks) + [4]
    chosen = next(fallback for fallback in two.ladder if fallback.execution == two.execution)
    assert (chosen.devices, chosen.fits, chosen.change) == (2, True, "execution.tp = 2")
    four = ask(25 * MB, tp="auto", degrees=(2, 4))
    assert four.devices == 4 and four.execution is not None and four.execution.tp == 4
    over = ask(20 * MB, tp="auto", degrees=(2,), host_bytes=10 * MB)
    assert over.verdict is VerdictKind.REFUSED
    assert [(fallback.devices, fallback.fits) for fallback in over.ladder if fallback.devices > 1] == [
        (2, False),
        (4, False),
    ]


@pytest.mark.slow
def test_what_cannot_be_sharded_is_no_fallback_and_says_why(ask: Callable[..., PlanAnswer], tmp_path: Path) -> None:
    for more, said in (
        ({"what": wide(tmp_path / "rows", optim={"name": "adafactor"}), "optimizer_impl": "plain"}, "adafactor"),
        ({"allow": "exact"}, 'execution.allow is "exact"'),
    ):
        found = ask(600 * MB, tp="auto", degrees=(2,), **more)
        assert found.verdict is VerdictKind.REFUSED and found.execution is None
        assert said in found.cannot_shard
