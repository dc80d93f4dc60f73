"""What tests of rehearsals say of the memory in an answer."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dryfit.gpu.events import BLOCK_BYTES
from dryfit.settings.memory_terms import MemoryCategory, VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer, RehearsalMemory, ScriptEnd
from rehearsed import PROGRAMS, rehearse


def memory_of(answer: RehearsalAnswer) -> RehearsalMemory:
    """The memory of a rehearsal that went well."""
    assert answer.end in (ScriptEnd.STOPPED, ScriptEnd.FINISHED), (answer.end, answer.reasons, answer.traceback)
    assert answer.verdict is VerdictKind.FITS, answer.reasons
    assert answer.memory is not None
    return answer.memory


def check_sums(memory: RehearsalMemory, program: str) -> None:
    """What each view of the peak adds up to, and whose line it is."""
    assert sum(memory.by_category.values()) == memory.peak_allocated_bytes
    for parts in ([one.bytes for one in memory.by_line], memory.by_module.values()):
        assert 0.9 * memory.peak_allocated_bytes <= sum(parts) <= memory.peak_allocated_bytes  # the largest ones
    assert max(memory.by_phase.values()) == memory.peak_allocated_bytes
    assert memory.peak_allocated_bytes <= memory.peak_reserved_bytes
    assert memory.peak_allocated_bytes <= memory.min_cap_bytes <= memory.required_bytes
    assert max(step.peak_bytes for step in memory.steps) <= memory.peak_allocated_bytes
    file, _, number = memory.peak_line.rpartition(":")
    assert Path(file) in (PROGRAMS / program, (PROGRAMS / program).with_name("one_layer.py"))
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    assert memory.peak_code == lines[int(number) - 1].strip()


def held_bytes(*sizes: tuple[int, ...]) -> int:
    """Bytes of blocks of the allocator for fp32 tensors of these sizes."""
    return sum(-(-4 * math.prod(size) // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


def takes_three_steps(
    folder: Path,
    program: str,
    arguments: list[Any],
    surroundings: Mapping[str, str] | None = None,
    *,
    after_evaluation: int = 0,
) -> None:
    """Rehearse an unmodified program to its third step, and check what is said of its memory.

    Args:
        after_evaluation: Steps that follow after its evaluation.
        arguments: ``out`` among them is a folder that is not there, and is not made.
    """
    out = folder / "out"
    arguments = [str(out) if word == "out" else word for word in arguments]
    memory = memory_of(rehearse(folder, program, *arguments, surroundings=surroundings))
    check_sums(memory, program)
    assert [step.number for step in memory.steps] == [1, 2, 3, 4][: 3 + after_evaluation]
    assert memory.by_category[MemoryCategory.OPTIMIZER] > 0
    assert memory.growth is None
    assert not out.exists()  # what it writes goes elsewhere
