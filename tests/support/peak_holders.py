"""What holds the memory at the peak of a training step, by operator, and what is reserved; each in a fresh process.

``peak_holders.py plan OUT CASE`` of a plan's run, its validation left out; ``peak_holders.py script OUT SCRIPT
ARGS...`` of a script on a virtual GPU. What lives on between steps is counted by category: another operator may have
made it.
"""

import json
import runpy
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.caching_allocator import replay
from dryfit.gpu.events import BLOCK_BYTES, Label
from dryfit.settings.memory_terms import MemoryCategory, StepPhase
from dryfit.settings.plan_messages import MemoryCase

LASTING = (
    MemoryCategory.WEIGHTS,
    MemoryCategory.ADAPTERS,
    MemoryCategory.GRADIENTS,
    MemoryCategory.OPTIMIZER,
    MemoryCategory.WORKSPACES,
)


RESERVED = "reserved"


def held_at_peak(events: Sequence[tuple[int, int, Label]]) -> dict[str, int]:
    """Bytes by operator, or by category, at the highest moment of training; and the most that training reserves.

    Args:
        events: Block, change and label of each.
    """
    sizes = [(1 if delta > 0 else -1) * -(-abs(delta) // BLOCK_BYTES) * BLOCK_BYTES for _, delta, _ in events]
    highest = [
        total if label.phase is not StepPhase.EVALUATE else 0
        for total, (_, _, label) in zip(accumulate(sizes), events, strict=True)
    ]
    live: dict[int, tuple[Label, int]] = {}
    for (block, _, label), size in zip(events[: highest.index(max(highest)) + 1], sizes, strict=False):
        if size > 0:
            live[block] = (label, size)
        else:
            del live[block]
    held: dict[str, int] = defaultdict(int)
    for label, size in live.values():
        held[label.category if label.category in LASTING else label.op] += size
    validating = {block for block, delta, label in events if delta > 0 and label.phase is StepPhase.EVALUATE}
    trained = [(block, delta) for block, delta, _ in events if block not in validating]
    blocks, deltas = zip(*trained, strict=True)
    held[RESERVED] = replay(blocks, deltas, AllocatorSettings()).peak_reserved_bytes
    return held


def of_plan(case: MemoryCase) -> dict[str, int]:
    """Of the plan of a case."""
    import torch

    from dryfit.gpu.constants import device_constants
    from dryfit.plans.estimate import Device
    from dryfit.training.calibrate import planned
    from rehearsed import device

    torch.set_num_threads(1)
    spec = device()
    constants = device_constants(spec, torch.__version__)
    _, run = planned(case, Device(spec, constants, AllocatorSettings.of(case.allocator), torch.__version__))
    labels = (run.label_table[number] for number in run.labels.tolist())
    return held_at_peak(list(zip(run.blocks.tolist(), run.deltas.tolist(), labels, strict=True)))


def of_script(command: Sequence[str]) -> dict[str, int]:
    """Of a script, run with its arguments."""
    import dryfit

    sys.argv = list(command)
    with dryfit.virtual_gpu("24GiB") as gpu:
        gpu.dispatch.processors = None  # as in a plan, which leaves out what it could not interpolate
        runpy.run_path(command[0], run_name="__main__")
        gpu.dispatch.categorize()
    run, categories = gpu.allocations, gpu.dispatch.categories()
    table = run.label_table
    events: list[tuple[int, int, Label]] = []
    for block, delta, number in zip(run.blocks, run.deltas, run.labels, strict=True):
        label = table[number]
        events.append((block, delta, replace(label, category=categories.get(block, label.category))))
    return held_at_peak(events)


if __name__ == "__main__":
    what, out, *rest = sys.argv[1:]
    if what == "plan":
        held = of_plan(MemoryCase.model_validate_json(Path(rest[0]).read_text(encoding="utf-8")))
    else:
        held = of_script(rest)
    Path(out).write_text(json.dumps(held), encoding="utf-8")
