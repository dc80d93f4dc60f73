"""What compiled code keeps on a virtual GPU, by hand, beside inductor's own code, and between its two bounds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.events import Label
from dryfit.gpu.script_recorder import LiveAllocations
from dryfit.settings.memory_terms import MemoryCategory, StepPhase
from dryfit.settings.rehearsal_messages import ScriptEnd
from rehearsed import SUPPORT, facts_of, rehearse
from rehearsed_memory import memory_of

pytestmark = pytest.mark.slow
ROWS, WORDS = 256, 5000
LOGITS = 4 * ROWS * WORDS
ROW_SUMS = 4 * ROWS
BLOCK = 512


@pytest.fixture(scope="module")
def facts() -> dict[str, dict[str, list[int]]]:
    return facts_of("compiled_facts.py", "cuda")


def test_a_chain_of_elements_keeps_its_input_alone(facts: dict[str, dict[str, list[int]]]) -> None:
    kept, most = facts["chain"]["compiled"]
    assert kept == LOGITS  # the output; what it was made of is computed again
    assert most == 3 * LOGITS + 2 * BLOCK  # output, its gradient, the input's; the sum and its gradient
    assert facts["chain"]["eager"][0] == 4 * LOGITS


def test_a_loss_over_many_words_keeps_two_numbers_for_each_row(facts: dict[str, dict[str, list[int]]]) -> None:
    kept, most = facts["loss"]["compiled"]
    assert kept == 2 * ROW_SUMS + 2 * BLOCK  # the largest logit, the sum's logarithm; the loss, the number of labels
    assert most < LOGITS + 4 * ROW_SUMS + 4 * BLOCK < facts["loss"]["eager"][1]


def test_a_norm_keeps_mean_and_deviation(facts: dict[str, dict[str, list[int]]]) -> None:
    assert facts["norm"]["compiled"][0] == LOGITS + 2 * ROW_SUMS


def test_what_is_saved_is_what_inductors_own_code_saves(facts: dict[str, dict[str, list[int]]]) -> None:
    """On the CPU it is really compiled; without channels last, for which the CPU copies inputs of convolutions."""
    environment = {**os.environ, "TORCHINDUCTOR_LAYOUT_OPTIMIZATION": "0"}
    command = [sys.executable, str(SUPPORT / "compiled_facts.py"), "cpu"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.splitlines()[-1])["saved"] == facts["saved"]


def test_bounds_are_close_and_below_what_runs_uncompiled(tmp_path: Path) -> None:
    found = []
    for number, mode in enumerate(("eager", "default", "default", "reduce-overhead")):
        (folder := tmp_path / str(number)).mkdir()
        answer = rehearse(folder, "compiled_programs.py", "layers", mode)
        assert answer.end in (ScriptEnd.FINISHED, ScriptEnd.STOPPED)
        found.append(memory_of(answer))
    eager, compiled, again, graphs = found
    for memory in (compiled, graphs):
        assert memory.least_bytes is not None
        assert 0.9 * memory.required_bytes <= memory.least_bytes <= memory.required_bytes
    assert compiled.required_bytes <= eager.required_bytes
    assert again == compiled


def test_a_private_pool_keeps_what_it_took() -> None:
    run, size = LiveAllocations(AllocatorSettings, None, 0), 32 * 2**20
    label = run.label(Label(StepPhase.FORWARD, MemoryCategory.ACTIVATIONS, "", "aten.empty"))

    def passing(block: int, *, fuses: bool = False) -> int:
        run.enter_pool("graphs")
        run.may_fuse = fuses
        run.add(block, size, label)
        run.may_fuse = False
        run.leave_pool()
        return run.allocator.reserved_bytes

    assert passing(0) == size
    run.add(0, -size, label)
    run.add(1, size, label)
    assert run.allocator.reserved_bytes == 2 * size  # the pool's place is free, but not for others
    assert passing(2) == 2 * size
    assert passing(3, fuses=True) == 3 * size
    assert sum(run.least()[1]) == 2 * size
