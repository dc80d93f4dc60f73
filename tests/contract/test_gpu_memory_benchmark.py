"""The benchmark for GPU machines, as far as it goes without one: configurations, control flow, tables."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_memory.py"
sys.path.insert(0, str(SCRIPT.parent))

import gpu_memory_tables as tables  # noqa: E402
from gpu_memory_cases import Entry, entries  # noqa: E402

from dryfit.meta.configs import most_tokens, planning_config  # noqa: E402
from dryfit.meta.pretrained import Kind, cannot_checkpoint  # noqa: E402
from dryfit.settings.memory_terms import Allocator, DeviceKind, DeviceSpec, OptimizerImpl  # noqa: E402
from dryfit.settings.plan_messages import Observation, PartPeak  # noqa: E402
from dryfit.settings.tables import Precision  # noqa: E402
from dryfit.training.optimizer import implementations  # noqa: E402

MIB = 2**20


def test_there_are_enough_configurations_of_every_sort() -> None:
    found = entries()
    assert len(found) >= 60
    assert len({entry.case.name for entry in found}) == len(found)
    cases = [entry.case for entry in found]
    precisions = set(Precision) - {Precision.AUTO, Precision.TF32}  # which takes the memory of fp32
    assert {case.subject.settings.train.precision for case in cases} == precisions
    assert {case.allocator for case in cases} == set(Allocator)
    assert {case.execution.optimizer_impl for case in cases} >= {OptimizerImpl.FUSED, OptimizerImpl.FOREACH}
    assert {case.subject.settings.optim.name for case in cases} == {"adamw", "adafactor", "sgd"}
    assert {case.execution.checkpointing for case in cases} == {case.padded for case in cases} == {True, False}
    assert any(case.reentrant for case in cases) and any(case.execution.accumulation > 1 for case in cases)
    assert {case.family for case in cases if case.padded} == {"encoder", "decoder LoRA", "decoder full"}
    assert sum(entry.is_capped for entry in found) >= 12
    assert sum(entry.keeps_history for entry in found) >= 6


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.case.name)
def test_every_configuration_can_be_run(entry: Entry) -> None:
    case = entry.case
    settings = case.subject.settings
    config = planning_config(settings.model)
    assert settings.train.max_length <= (most_tokens(config) or settings.train.max_length)
    impl = case.execution.optimizer_impl
    assert impl is OptimizerImpl.AUTO or impl in implementations(settings.optim.name, DeviceKind.CUDA)
    if case.execution.checkpointing:
        kind = Kind.CAUSAL_LM if case.family.startswith("decoder") else Kind.ENCODER
        assert not cannot_checkpoint(config, kind, reentrant=case.reentrant)


def dry(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--dry", "--out", str(folder / "out"), "--lines", str(folder / "lines")]
    return subprocess.run([*command, *words], capture_output=True, text=True, check=False)


def results() -> tables.Results:
    """Two configurations, planned 2 % too high and 4 % too low."""
    found: tables.Results = {}
    for entry, share in zip(entries()[:2], (1.02, 0.96), strict=True):
        seen = Observation(
            case=entry.case,
            device=DeviceSpec(name="NVIDIA H200", capacity_bytes=2**37, capability=(9, 0)),
            torch="2.13.0+cu130",
            parts=(PartPeak(part="third step", allocated_bytes=1000 * MIB, reserved_bytes=1200 * MIB),),
            context_bytes=500 * MIB,
            workspace_bytes=(32 * MIB, 32 * MIB),
            steps=3,
        )
        plan: dict[str, Any] = {"status": "ok", "family": entry.case.family, "precision": entry.precision}
        plan |= {"optimizer": entry.optimizer, "segments": "expandable", "min_cap_bytes": 1010 * MIB}
        plan |= {"peak_allocated_bytes": int(share * 1000 * MIB), "peak_reserved_bytes": int(share * 1200 * MIB)}
        run = {"status": "ok", "observation": seen.model_dump(mode="json")}
        found[entry.case.name] = {"plan": plan, "run": run, "cap-above": {"status": "survived"}}
    return found


def test_the_tables_tell_errors_by_group() -> None:
    rows = tables.compared(results())
    assert [round(row["allocated_error"], 4) for row in rows] == [0.02, -0.04]
    groups = tables.group_table(rows).splitlines()
    everything = next(line for line in groups if line.startswith("| all padded"))
    assert [cell.strip() for cell in everything.split("|")[2:9]] == [
        *("2", "3.00%", "4.00%", "4.00%"),
        *("3.00%", "4.00%", "4.00%"),
    ]
    assert len({len(line) for line in groups}) == 1
    assert "+2.00%" in tables.case_table(rows)
    assert tables.cap_table(results()).count("survived") == 2


def test_what_was_not_done_is_told() -> None:
    found = {"a": {"plan": {"status": "failed", "why": "KeyError: 'x'"}}, "b": {"run": {"status": "too large"}}}
    said = tables.trouble_table(found)
    assert "KeyError" in said and "too large" in said
