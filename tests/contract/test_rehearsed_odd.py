"""Strange scripts on a virtual GPU: how each ends, what is followed, and what is said to be unknown."""

from pathlib import Path

import pytest

import dryfit
from dryfit.gpu.events import BLOCK_BYTES
from dryfit.settings.devices import parse_device
from dryfit.settings.memory_terms import MemoryCategory, StepPhase, VerdictKind
from dryfit.settings.rehearsal_messages import ScriptEnd
from rehearsed import MIB, PROGRAMS, line_of, rehearse
from rehearsed_memory import check_sums, held_bytes, memory_of

pytestmark = pytest.mark.slow
ENDS = {
    "fails.py": (ScriptEnd.FAILED, "ValueError: no such label: 7"),
    "fails_early.py": (ScriptEnd.FAILED, "KeyError: 'labels'"),
    "exits_early.py": (ScriptEnd.NO_STEP, ""),
    "no_step.py": (ScriptEnd.NO_STEP, ""),
    "asks.py": (ScriptEnd.FAILED, "EOFError"),
    "lacks_package.py": (ScriptEnd.FAILED, "No module named 'flash_mla'"),
    "second_device.py": (ScriptEnd.FAILED, "invalid device ordinal"),
}


@pytest.mark.parametrize("program", ENDS)
def test_scripts_that_end_by_themselves(tmp_path: Path, program: str) -> None:
    end, text = ENDS[program]
    answer = rehearse(tmp_path, f"odd/{program}")
    assert answer.end is end, (answer.end, answer.traceback)
    assert text in answer.traceback
    assert answer.verdict is VerdictKind.UNKNOWN and answer.reasons
    assert ("this machine lacks" in answer.reasons[0]) is (program == "lacks_package.py")


def test_a_script_without_an_optimizer_fits_as_it_is(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/infers.py")
    assert (answer.end, answer.verdict, answer.fits) == (ScriptEnd.FINISHED, VerdictKind.FITS, True)
    assert len(answer.notes) == 1 and not answer.unknown
    memory = memory_of(answer)
    assert 36 * MIB < memory.peak_allocated_bytes < 64 * MIB and memory.peak_line == line_of(
        "odd/infers.py", "scores = model"
    )


@pytest.mark.parametrize(
    ("mib", "verdict"), [(1200, VerdictKind.FITS), (1040, VerdictKind.UNKNOWN), (900, VerdictKind.REFUSED)]
)
def test_scratch_memory_that_nobody_knows_makes_two_bounds(mib: int, verdict: VerdictKind) -> None:
    answer = dryfit.rehearse(PROGRAMS / "odd/factorizes.py", device=f"{mib}MiB")
    memory = answer.memory
    assert memory is not None and memory.least_bytes is not None
    assert 128 * MIB <= memory.required_bytes - memory.least_bytes <= 136 * MIB  # the matrix and its factors once more
    assert (answer.verdict, answer.fits) == (verdict, verdict is VerdictKind.FITS), answer.reasons


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_asks_the_driver_is_told_of_the_virtual_device(tmp_path: Path, ranks: int) -> None:
    answer = rehearse(tmp_path, "odd/asks_driver.py", ranks=ranks)
    assert answer.end is ScriptEnd.FINISHED, answer.traceback


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_the_code_of_a_custom_operator_counts_though_it_has_a_fake(tmp_path: Path, mode: str) -> None:
    found = []
    for way in ("torch", "5", "6"):
        (folder := tmp_path / way).mkdir()
        answer = rehearse(folder, "odd/own_products.py", way, mode)
        assert answer.end is ScriptEnd.FINISHED and not answer.unknown, answer.traceback
        assert answer.work is not None
        found.append((memory_of(answer).steps[2].peak_bytes, answer.work.flops_per_step))
    (_, flops), (peak, five), (higher_peak, six) = found
    assert flops == five == six > 0
    assert higher_peak - peak == 4 * 2048 * 16384


def test_compiled_code_leaves_function_modes_as_they_were(tmp_path: Path) -> None:
    answers = []
    for way in ("eager", "compiled"):
        (folder := tmp_path / way).mkdir()
        answers.append(rehearse(folder, "odd/function_modes.py", way))
    assert [answer.end for answer in answers] == [ScriptEnd.FINISHED] * 2, answers[1].traceback
    eager, compiled = ([step.peak_bytes for step in memory_of(answer).steps] for answer in answers)
    assert compiled == eager and len(eager) == 3


@pytest.mark.parametrize(("way", "ranks"), [("traced", 1), ("default_type", 1), ("sync", 4)])
def test_older_ways_of_the_same_training_take_what_it_takes(tmp_path: Path, way: str, ranks: int) -> None:
    steps = []
    for one in ("plain", way):
        (folder := tmp_path / one).mkdir()
        answer = rehearse(folder, "odd/images.py", one, ranks=ranks)
        assert answer.verdict is VerdictKind.FITS, answer.traceback
        steps.append([step.peak_bytes for step in memory_of(answer).steps])
    activation = 4 * 16 * 64 * 64 * 64
    assert abs(steps[1][0] - steps[0][0]) < MIB < 4 * activation < steps[0][0]
    # From its second step TorchScript takes derivatives itself, and keeps a product of the last activation.
    assert abs(steps[1][2] - steps[0][2] - (activation if way == "traced" else 0)) < MIB


@pytest.mark.parametrize(
    ("way", "mib", "verdict"),
    [
        *(("ranks", 3000, VerdictKind.FITS), ("ranks", 1100, VerdictKind.UNKNOWN)),
        *(("helpers", 1100, VerdictKind.FITS), ("actors", 1100, VerdictKind.FITS)),
    ],
)
def test_the_first_of_its_own_processes_that_train_is_followed(
    tmp_path: Path, way: str, mib: int, verdict: VerdictKind
) -> None:
    answer = rehearse(tmp_path, "odd/own_processes.py", way, device=parse_device(f"{mib}MiB"))
    assert answer.verdict is verdict, answer.traceback
    assert answer.memory is not None and len(answer.memory.steps) == 3
    assert any("of 2 processes" in note for note in answer.notes) is (way == "ranks")


def test_what_code_allocates_within_a_backward_pass_stands_at_its_own_line(tmp_path: Path) -> None:
    memory = memory_of(rehearse(tmp_path, "odd/hooks.py"))
    found = {part.line: part.bytes for part in memory.by_line if part.bytes >= 16 * MIB}
    wanted = {"in a function's pass": 64, "in a parameter's hook": 32, "of a tensor's hook": 16}
    assert {line_of("odd/hooks.py", text): mib * MIB for text, mib in wanted.items()}.items() <= found.items()


def test_a_backward_pass_stands_where_its_operators_stood(tmp_path: Path) -> None:
    memory = memory_of(rehearse(tmp_path, "odd/places.py"))
    assert memory.peak_line == line_of("odd/places.py", "hidden = embed(ids)")
    held = {part.line for part in memory.by_line if part.category is MemoryCategory.GRADIENTS}
    assert held == {line_of("odd/places.py", text) for text in ("hidden = embed(ids)", "logits = head(hidden)")}


@pytest.mark.parametrize("how", [[], ["at once"]])
def test_a_status_of_its_own_is_told(tmp_path: Path, how: list[str]) -> None:
    answer = rehearse(tmp_path, "odd/exits.py", *how)
    assert answer.end is ScriptEnd.FAILED and answer.memory is not None and len(answer.memory.steps) == 2
    assert "exit status 3" in answer.traceback


STRANGE = {
    "asks_terminal.py": 3,
    "threads.py": 3,
    "forks.py": 2,
    "forks_device.py": 2,
    "item_branches.py": 3,
    "compiles.py": 3,
    "replicates.py": 3,
    "rare_calls.py": 3,
    "own_allocator.py": 3,
    "prints_memory.py": 3,
    "numpy_outputs.py": 2,
    "copies_model.py": 3,
    "swaps_tensors.py": 3,
    "wraps_tensors.py": 3,
    "custom_operators.py": 3,
    "guards.py": 3,
    "reads_checkpoint.py": 3,
    "sparse_tensors.py": 3,
}
AT_NIGHT = ("asks_terminal.py", "copies_model.py", "prints_memory.py", "reads_checkpoint.py", "item_branches.py")
SAID = {"compiles.py": "torch.compile", "sparse_tensors.py": "no time is told"}


@pytest.mark.parametrize(
    "program",
    [one if one not in AT_NIGHT else pytest.param(one, marks=pytest.mark.nightly) for one in STRANGE],
)
def test_strange_scripts_are_followed(tmp_path: Path, program: str) -> None:
    answer = rehearse(tmp_path, f"odd/{program}")
    memory = memory_of(answer)
    check_sums(memory, f"odd/{program}")
    assert len(memory.steps) == STRANGE[program]
    assert memory.by_category[MemoryCategory.WEIGHTS] >= held_bytes((2, 8), (2,))
    said = (*answer.notes, *(one.what for one in answer.unknown))
    assert any(SAID.get(program, "") in text for text in said) or program not in SAID


def test_data_on_the_device_are_no_weights_and_plain_tensors_of_an_optimizer_are(tmp_path: Path) -> None:
    held = memory_of(rehearse(tmp_path, "odd/plain_tensors.py")).by_category
    weights = held_bytes((100, 30), (30, 10))
    assert held[MemoryCategory.INPUTS] == held_bytes((500, 100)) + held_bytes((500, 2))  # whole numbers have 8 bytes
    assert held[MemoryCategory.WEIGHTS] == 2 * weights and held[MemoryCategory.OPTIMIZER] == weights


def test_tensors_within_a_quantised_one_are_what_that_is(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/quantised_weights.py")
    assert answer.went_through, answer.traceback  # torchao's product of 8 bits, which a text with "FakeTensor" hinders
    held = memory_of(answer).by_category
    assert held[MemoryCategory.WEIGHTS] == 4096 * 4096 + held_bytes((4096,), (4096,))
    assert held[MemoryCategory.OPTIMIZER] == 2048 * 4096 + held_bytes((2048,))
    assert MemoryCategory.INPUTS not in held


def test_an_output_that_has_no_largest_size_leaves_the_need_open(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/repeats_rows.py")
    assert answer.end is ScriptEnd.FINISHED, answer.traceback
    assert answer.verdict is VerdictKind.UNKNOWN and answer.at_least
    (reason,) = answer.reasons
    assert "aten.repeat_interleave" in reason
    assert f"{line_of('odd/repeats_rows.py', '# how many rows')};" in reason
    assert not any("repeat_interleave" in one.what for one in answer.unknown)
    assert answer.memory is not None and len(answer.memory.steps) == 3


def test_tensors_of_own_classes_take_what_plain_ones_take(tmp_path: Path) -> None:
    """The script keeps every other batch until the step after the next, which is no growth."""
    plain, kinds = (
        memory_of(rehearse(tmp_path, "odd/kinds_of_tensors.py", way, steps=4)) for way in ("plain", "kinds")
    )
    assert kinds.peak_allocated_bytes == plain.peak_allocated_bytes
    assert kinds.steps == plain.steps and len({step.end_bytes for step in kinds.steps}) == 2
    assert kinds.growth is None


def test_unknown_probabilities_sum_up_to_one_on_the_host(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/draws_actions.py")
    assert answer.end is ScriptEnd.FINISHED and answer.verdict is VerdictKind.FITS, answer.traceback


def test_what_trains_in_evaluation_mode_is_training(tmp_path: Path) -> None:
    """Four steps: in the ``second`` way the last one begins the epoch in which no module is in training mode."""
    ways = ("training", "evaluation", "second")
    answers = [rehearse(tmp_path, "odd/evaluation_mode.py", way, steps=4) for way in ways]
    assert all(answer.end is not ScriptEnd.FAILED and answer.verdict is VerdictKind.FITS for answer in answers)
    works = [answer.work for answer in answers if answer.work is not None]
    assert [work.flops_per_step for work in works] == [2 * 2 * 32 * 64 * 8] * 3
    assert [answer.run.epoch_steps for answer in answers] == [3] * 3
    assert [StepPhase.FORWARD in memory_of(answer).by_phase for answer in answers] == [True] * 3


def test_jagged_nested_tensors_take_what_rows_packed_by_hand_take(tmp_path: Path) -> None:
    """Besides are the int64 offsets, from which the kernel's int32 ones are made."""
    nested, packed = (memory_of(rehearse(tmp_path, "odd/jagged_rows.py", way)) for way in ("nested", "packed"))
    assert nested.peak_allocated_bytes - packed.peak_allocated_bytes == 2 * BLOCK_BYTES
    assert nested.by_category.keys() == packed.by_category.keys() and len(nested.steps) == 3


def test_an_average_that_is_made_late_is_weights(tmp_path: Path) -> None:
    held = memory_of(rehearse(tmp_path, "odd/late_average.py")).by_category
    weights = held_bytes((30, 100), (30,))
    assert held[MemoryCategory.WEIGHTS] == 2 * weights and held[MemoryCategory.OPTIMIZER] == weights


def test_the_history_of_lbfgs_is_full_although_a_rehearsal_makes_three_steps(tmp_path: Path) -> None:
    """The script itself reaches 20 entries after many iterations; none of them is growth."""
    answer = rehearse(tmp_path, "odd/second_order.py")
    memory, vector = memory_of(answer), held_bytes((1024, 1024)) + held_bytes((1024, 8))
    assert any("LBFGS" in note for note in answer.notes)
    ends = [step.end_bytes for step in memory.steps]
    assert 40 * vector < ends[0] < 50 * vector and max(ends) - min(ends) < vector
    assert memory.growth is None


@pytest.mark.parametrize("arguments", [(), ("--tensors",)])
def test_weights_that_are_changed_by_hand_take_three_steps_too(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    memory = memory_of(rehearse(tmp_path, "odd/steps_by_hand.py", *arguments))
    assert [step.number for step in memory.steps] == [1, 2, 3]
    assert len({step.end_bytes for step in memory.steps}) == 1 and memory.growth is None
    if arguments:
        assert memory.by_category[MemoryCategory.WEIGHTS] == held_bytes((64, 256), (256, 64))
        assert memory.peak_at.phase is not StepPhase.LOAD


def test_passes_after_a_step_of_any_optimizer_have_gradients_as_have_those_that_ask_for_them(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/optimizers_in_turn.py")
    assert answer.went_through, answer.traceback
    weights = held_bytes((64, 256), (256,), (256, 64), (64,))
    assert memory_of(answer).by_category[MemoryCategory.OPTIMIZER] >= 2 * weights


def test_what_only_a_device_could_run_is_no_failure_of_the_script(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/higher_order.py")
    assert answer.verdict is VerdictKind.UNKNOWN and answer.end is ScriptEnd.STOPPED
    (reason,) = answer.reasons
    assert reason.endswith("HigherOrderOperator cond")
    (tmp_path / "two").mkdir()
    replicas = rehearse(tmp_path / "two", "odd/replicates.py", ranks=2)
    assert replicas.verdict is VerdictKind.UNKNOWN and replicas.end is ScriptEnd.STOPPED
    assert replicas.reasons == ("it copies the model to 2 devices at each step",)


@pytest.mark.parametrize(
    ("device", "verdict", "end"),
    [
        pytest.param("3GiB", VerdictKind.FITS, ScriptEnd.FINISHED, marks=pytest.mark.nightly),
        ("2200MiB", VerdictKind.UNKNOWN, ScriptEnd.FINISHED),  # but for the margin
        ("1200MiB", VerdictKind.REFUSED, ScriptEnd.OUT_OF_MEMORY),
    ],
)
def test_a_compiled_script_needs_something_between_two_bounds(
    device: str, verdict: VerdictKind, end: ScriptEnd
) -> None:
    answer = dryfit.rehearse(PROGRAMS / "odd/compiles.py", device=device, arguments=["--rows", "3000000"])
    memory = answer.memory
    assert memory is not None and memory.least_bytes is not None
    assert (answer.verdict, answer.end) == (verdict, end), (memory.least_bytes, memory.required_bytes)
    assert (memory.required_bytes <= answer.device.capacity_bytes) is (verdict is VerdictKind.FITS)
    assert (memory.least_bytes > answer.device.capacity_bytes) is (verdict is VerdictKind.REFUSED)
    assert verdict is VerdictKind.FITS or "between" in answer.reasons[0]


@pytest.mark.parametrize(
    ("bits", "on_device"),
    [pytest.param(32, [], marks=pytest.mark.nightly), (8, 2 * [(1024 * 1024 // 256,)] + 2 * [(256,)])],
)
def test_paged_moments_lie_on_the_host(tmp_path: Path, bits: int, on_device: list[tuple[int, ...]]) -> None:
    """On the device stay what 8 bits need besides: a scale for each 256 numbers, and two maps of codes."""
    answer = rehearse(tmp_path, "odd/paged_optimizer.py", "--bits", bits)
    held = memory_of(answer).by_category
    assert held[MemoryCategory.WEIGHTS] >= held_bytes((1024, 1024))
    assert held.get(MemoryCategory.OPTIMIZER, 0) == held_bytes(*on_device)
    assert any("paged" in text for text in answer.notes)


def test_loops_without_gradients_are_left_out_once_they_repeat(tmp_path: Path) -> None:
    answers = []
    for batches in (8, 40):
        folder = tmp_path / str(batches)
        folder.mkdir()
        answers.append(rehearse(folder, "odd/evaluates_by_hand.py", "--batches", batches))
    few, many = map(memory_of, answers)
    assert (many.peak_allocated_bytes, many.peak_reserved_bytes) == (few.peak_allocated_bytes, few.peak_reserved_bytes)
    assert (many.peak_line, many.by_category) == (few.peak_line, few.by_category)
    assert [any("were left out" in note for note in answer.notes) for answer in answers] == [False, True]
    assert any(note.startswith("96 calls") for note in answers[1].notes)
    first, second = (answer.work for answer in answers)
    assert first is not None and second is not None and second.flops_per_step > first.flops_per_step


@pytest.mark.nightly
def test_flash_attention_by_name_has_the_memory_of_torchs_kernel(tmp_path: Path) -> None:
    """Without padding both keep the same; flash attention has a copy of its output in the other order of heads."""
    memories = []
    for name in ("flash_attention_2", "sdpa"):
        (tmp_path / name).mkdir()
        memories.append(memory_of(rehearse(tmp_path / name, "odd/flash_attention.py", "--attention", name)))
    by_name, by_torch = memories
    assert by_name.peak_allocated_bytes == by_torch.peak_allocated_bytes


ROWS = """
import torch

@register("dryfit_test_rows::scale")
def scale(x, factor):
    torch.empty(2**22, device=x.device)
    return torch.empty_like(x)

@register("dryfit_test_extension.shift")
def shift(x):
    return torch.empty_like(x)
"""


def test_own_rows_and_given_packages_are_there_and_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.py"
    rows.write_text(ROWS, encoding="utf-8")
    (tmp_path / "with").mkdir()
    answer = rehearse(tmp_path / "with", "odd/own_rows.py", given=(str(rows), "flash_attn"))
    assert answer.end is ScriptEnd.FINISHED, answer.traceback
    assert [text.partition(" ")[0] for text in answer.assumed] == ["flash-attn", "dryfit_test_extension"]
    assert "(--with)" in answer.assumed[0]
    # Beside the weight and, of the last step, what it was multiplied by: the row's scratch and output.
    assert memory_of(answer).peak_allocated_bytes >= (1 + 4 + 1) * 4 * MIB


def test_a_package_without_a_stand_in_is_no_choice(tmp_path: Path) -> None:
    with pytest.raises(dryfit.DryfitError, match="transformer_engine, or a Python file"):
        dryfit.rehearse(PROGRAMS / "odd/own_rows.py", device="24GiB", with_packages=["no_such"])


def test_its_own_allocator_settings_are_heeded(tmp_path: Path) -> None:
    memory = memory_of(rehearse(tmp_path, "odd/own_allocator.py"))
    # Segments grow, so that each larger batch reuses what the last one left; others would keep 90 MiB beside it.
    assert memory.peak_reserved_bytes - memory.peak_allocated_bytes < 30 * MIB


def test_a_step_moves_the_parts_of_a_sparse_tensor_and_not_its_dense_size(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/sparse_tensors.py")
    assert answer.work is not None and answer.work.step_time is None
    dense = 2048 * 2048 * 4
    assert 0 < answer.work.bytes_per_step < 10 * dense  # two products, forward and back, looked at its parts often


def test_a_product_of_two_sparse_tensors_is_unknown(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\na = torch.eye(8).to_sparse().cuda()\ntorch.sparse.mm(a, a)\n", encoding="utf-8")
    answer = rehearse(tmp_path, str(script))
    assert answer.verdict is VerdictKind.UNKNOWN and "has no stand-in" in answer.reasons[0]
