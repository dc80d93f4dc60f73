"""Loops as users write them, on a virtual GPU: what each takes, by category and by line."""

from pathlib import Path
from typing import Any

import pytest

from dryfit.settings.memory_terms import MemoryCategory, StepPhase
from parts import need_package
from rehearsed import line_of, rehearse
from rehearsed_memory import BLOCK_BYTES, check_sums, held_bytes, memory_of, takes_three_steps
from timm_beside import with_timm

pytestmark = pytest.mark.slow


def encoder_layer(width: int) -> list[tuple[int, ...]]:
    """Parameters of a ``TransformerEncoderLayer`` whose inner layer is four times as wide."""
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    return [*attention, (4 * width, width), (4 * width,), (width, 4 * width), (width,), *4 * [(width,)]]


def test_a_plain_loop_with_a_scaler_takes_its_weights_gradients_and_moments(tmp_path: Path) -> None:
    steps = 3
    sizes = {"width": 256, "layers": 4, "vocabulary": 1000, "length": 64, "batch": 8}
    arguments = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    answer = rehearse(tmp_path, "plain_loop.py", *arguments, steps=steps)
    memory = memory_of(answer)
    check_sums(memory, "plain_loop.py")
    weights = held_bytes((1000, 256), *4 * encoder_layer(256), (2, 256), (2,))
    assert memory.by_category[MemoryCategory.WEIGHTS] == weights
    assert memory.by_category[MemoryCategory.OPTIMIZER] == 2 * weights  # its counters of steps are on the host
    assert len(memory.steps) == steps and memory.growth is None
    assert len({step.peak_bytes for step in memory.steps[1:]}) == 1
    # Between two steps: weights, moments, gradients until `zero_grad`, cuBLAS's workspaces, the scaler's numbers, loss.
    workspaces = memory.by_category[MemoryCategory.WORKSPACES]
    assert 0 <= memory.steps[-1].end_bytes - 4 * weights - workspaces <= 40 * BLOCK_BYTES
    # What is freed bears the line that frees it, not that of the last allocation.
    freed = [point for point in memory.timeline if point.line == line_of("plain_loop.py", "zero_grad")]
    assert {(point.step, point.phase) for point in freed} == {(n, StepPhase.OPTIMIZER) for n in range(2, steps + 1)}
    second = [point.allocated_bytes for point in freed if point.step == 2]
    assert second == sorted(second, reverse=True)
    assert second[0] - second[-1] >= 0.5 * weights  # a sample of the frees of all gradients


RUNS: dict[str, tuple[str, list[Any]]] = {
    "lightning": ("lightning_module.py", ["--output_dir", "out"]),
    "accelerate fp16": ("accelerate_loop.py", ["--precision", "fp16"]),
    "timm": ("timm_vit.py", []),
    "peft": ("peft_alone.py", ["--output_dir", "out"]),
}
AT_NIGHT = ("timm",)


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.nightly) if run in AT_NIGHT else run for run in RUNS]
)
def test_unmodified_loops_run_to_the_third_step(tmp_path: Path, run: str) -> None:
    if run == "lightning":
        need_package("lightning")
    takes_three_steps(
        tmp_path,
        *RUNS[run],
        surroundings=with_timm(tmp_path / "timm") if run == "timm" else None,
        after_evaluation=run == "lightning",
    )


def test_adapters_alone_are_told_from_the_frozen_weights(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "peft_alone.py", "--output_dir", tmp_path / "out", "--width", 128, "--layers", 3)
    memory = memory_of(answer)
    adapters = held_bytes(*3 * [(4, 128), (128, 4), (4, 128), (64, 4)])
    assert memory.by_category[MemoryCategory.ADAPTERS] == adapters
    assert memory.by_category[MemoryCategory.OPTIMIZER] == 2 * adapters
    attention = [(128, 128), (64, 128), (64, 128), (128, 128)]
    layer = [*attention, *3 * [(256, 128)], *2 * [(128,)]]
    weights = held_bytes(*3 * layer, *2 * [(100, 128)], (128,))
    assert 0 <= memory.by_category[MemoryCategory.WEIGHTS] - weights <= 4 * BLOCK_BYTES  # and RoPE's frequencies


def test_what_a_step_keeps_is_named_with_its_line(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "leak.py", steps=5)
    memory = memory_of(answer)
    assert memory.growth.line == line_of("leak.py", "kept by the graph")
    assert "hidden = model" in memory.growth.code
    batch, width = 32, 64
    assert memory.growth.bytes_per_step >= 4 * batch * (width + 4 * width)
    ends = [step.end_bytes for step in memory.steps]
    assert ends == sorted(set(ends))


def test_what_an_evaluation_keeps_of_each_batch_is_named_with_its_line(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "gathers_logits.py", steps=2)
    kept = memory_of(answer).evaluation_growth
    assert kept.line == line_of("gathers_logits.py", "kept for all batches") and "kept.append" in kept.code
    assert kept.bytes_per_batch == 4 * 64 * 4096 and kept.batches_left_out == 10 - 4


ACCUMULATED: dict[str, tuple[list[Any], int]] = {
    "the loss inside": ([], 3 * 13),
    "the loss outside": (["--apart"], 3 * 13),
    "a longer one late": (["--longer_at", 14], 3 * 12),
    "graphs that stay": (["--keeps"], 0),
    "a loss of a part": (["--auxiliary"], 0),
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.nightly) if how == "the loss inside" else how for how in ACCUMULATED]
)
def test_passes_that_repeat_those_before_them_are_left_out_and_nothing_changes(tmp_path: Path, how: str) -> None:
    arguments, left_out = ACCUMULATED[how]
    (tmp_path / "long").mkdir()
    (tmp_path / "short").mkdir()
    answer = rehearse(tmp_path / "long", "accumulates.py", "--micro_batches", 16, *arguments)
    memory = memory_of(answer)
    check_sums(memory, "accumulates.py")
    note = next((note for note in answer.notes if "passes were left out" in note), "0 ")
    assert int(note.partition(" ")[0]) == left_out
    # Sixteen equal ones take what two of them do: the second finds gradients; a block holds up to 1 MiB more.
    if how.startswith("the loss"):
        few = rehearse(tmp_path / "short", "accumulates.py", "--micro_batches", 2, *arguments)
        assert memory.peak_allocated_bytes == pytest.approx(memory_of(few).peak_allocated_bytes, abs=2**20)
        assert memory.peak_reserved_bytes == memory_of(few).peak_reserved_bytes
        # What lies in a pass that was left out bears the lines of the pass it repeats.
        lines = [{(one.line, one.category): one.bytes for one in of.by_line} for of in (memory, memory_of(few))]
        assert lines[0] == pytest.approx(lines[1], abs=2**20)
        assert memory.by_category.keys() == memory_of(few).by_category.keys()
        assert answer.work.flops_per_step == 8 * few.work.flops_per_step
        assert answer.work.bytes_per_step == pytest.approx(8 * few.work.bytes_per_step, rel=0.1)
