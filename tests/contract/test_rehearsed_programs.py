"""Programs as users write them, on a virtual GPU: what each takes, where, and how it ends."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from dryfit.core.jobs.memory import MemoryCategory, StepPhase, VerdictKind
from dryfit.core.jobs.rehearsal import RehearsalAnswer, RehearsalMemory, ScriptEnd
from dryfit.memory.planning.timeline import BLOCK_BYTES
from dryfit.runtime.rehearsal.command_line import parse_command
from parts import need_package
from rehearsed import GIB, MIB, PROGRAMS, device, hide, line_of, rehearse
from timm_beside import with_timm

pytestmark = pytest.mark.slow
SFT = "trl.scripts.sft"


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
    assert memory.peak_line.startswith(f"{PROGRAMS / program}:")
    number = int(memory.peak_line.rpartition(":")[2])
    lines = (PROGRAMS / program).read_text(encoding="utf-8").splitlines()
    assert memory.peak_code == lines[number - 1].strip()


def held_bytes(*sizes: tuple[int, ...]) -> int:
    """Bytes of blocks of the allocator for fp32 tensors of these sizes."""
    return sum(-(-4 * math.prod(size) // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


def encoder_layer(width: int) -> list[tuple[int, ...]]:
    """Parameters of a ``TransformerEncoderLayer`` whose inner layer is four times as wide."""
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    return [*attention, (4 * width, width), (4 * width,), (width, 4 * width), (width,), *4 * [(width,)]]


@pytest.mark.parametrize("steps", [2, 3])
def test_a_plain_loop_with_a_scaler_takes_its_weights_gradients_and_moments(tmp_path: Path, steps: int) -> None:
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
    "glue": ("glue_trainer.py", ["--output_dir", "out", "--precision", "fp16"]),
    "causal": ("causal_lm_trainer.py", ["--output_dir", "out"]),
    "causal without checkpointing": ("causal_lm_trainer.py", ["--output_dir", "out", "--no-checkpointing"]),
    "causal reentrant": ("causal_lm_trainer.py", ["--output_dir", "out", "--reentrant"]),
    "causal fp16": ("causal_lm_trainer.py", ["--output_dir", "out", "--precision", "fp16"]),
    "sft": ("sft_lora.py", ["--output_dir", "out"]),
    "dpo": ("dpo_lora.py", ["--output_dir", "out"]),
    "dpo in 8 bits": ("dpo_lora.py", ["--output_dir", "out", "--optim", "adamw_8bit"]),
    "grpo": ("grpo.py", ["--output_dir", "out"]),
    "lightning": ("lightning_module.py", ["--output_dir", "out"]),
    "accelerate": ("accelerate_loop.py", []),
    "accelerate bf16": ("accelerate_loop.py", ["--precision", "bf16"]),
    "accelerate fp16": ("accelerate_loop.py", ["--precision", "fp16"]),
    "timm": ("timm_vit.py", []),
    "peft": ("peft_alone.py", ["--output_dir", "out"]),
}
NEEDS = {"lightning": ("lightning",)} | dict.fromkeys(("sft", "dpo", "dpo in 8 bits", "grpo"), ("trl",))


@pytest.mark.parametrize("run", RUNS)
def test_unmodified_programs_run_to_the_third_step(tmp_path: Path, run: str) -> None:
    for package in NEEDS.get(run, ()):
        need_package(package)
    program, arguments = RUNS[run]
    arguments = [str(tmp_path / "out") if word == "out" else word for word in arguments]
    surroundings = with_timm(tmp_path / "timm") if run == "timm" else None
    memory = memory_of(rehearse(tmp_path, program, *arguments, surroundings=surroundings))
    check_sums(memory, program)
    assert [step.number for step in memory.steps] == [1, 2, 3]
    assert memory.by_category[MemoryCategory.OPTIMIZER] > 0
    assert memory.growth is None
    assert not (tmp_path / "out").exists()  # what it writes goes elsewhere


ADAPTERS = ("--use_peft", "--lora_target_modules", "all-linear", "--gradient_accumulation_steps", "2")
SHARDED = (
    "accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
)


@pytest.mark.parametrize("launcher", [[], SHARDED.split()], ids=["alone", "sharded"])
def test_the_script_that_trl_ships_runs_as_a_module(tmp_path: Path, launcher: list[str]) -> None:
    need_package("trl")
    model, rows = tmp_path / "model", tmp_path / "rows"
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    AutoConfig.for_model(
        "qwen2", architectures=["Qwen2ForCausalLM"], intermediate_size=64, vocab_size=300, **size
    ).save_pretrained(model)
    letters = {letter: number for number, letter in enumerate(["<|endoftext|>", *sorted(ByteLevel.alphabet())])}
    core = Tokenizer(BPE(letters, merges=[]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>").save_pretrained(model)
    rows.mkdir()
    lines = [json.dumps({"text": "a word " * number}) for number in range(1, 21)]
    (rows / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = {"model_name_or_path": model, "dataset_name": rows, "output_dir": tmp_path / "out"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--per_device_train_batch_size", "2", "--report_to", "none", *(() if launcher else ADAPTERS)]
    command = parse_command([*launcher, "-m", SFT, *words], lambda _: {})
    ranks, surroundings = command.ranks or 1, dict(command.environment)
    answer = rehearse(tmp_path, None, *command.arguments, module=command.module, ranks=ranks, surroundings=surroundings)
    memory = memory_of(answer)
    assert [step.number for step in memory.steps] == [1, 2, 3]
    assert (MemoryCategory.ADAPTERS in memory.by_category) is not bool(launcher)
    assert (answer.sent is not None and answer.sent["reduce_scatter"] > 0) is bool(launcher)
    assert memory.peak_code.startswith("trainer.train(")
    assert answer.worst_batch is not None and answer.worst_batch.shapes["input_ids"] == (2, 20 * len("a word ") + 1)
    assert any(muted.what.startswith("checkpoint") for muted in answer.muted)
    assert not (tmp_path / "out").exists()


def test_preferences_without_bitsandbytes(tmp_path: Path) -> None:
    need_package("trl")
    arguments = ("--output_dir", tmp_path / "out")
    without = memory_of(
        rehearse(tmp_path, "dpo_lora.py", *arguments, surroundings=hide(tmp_path / "hidden", "bitsandbytes"))
    )
    (tmp_path / "with").mkdir()
    beside = memory_of(rehearse(tmp_path / "with", "dpo_lora.py", *arguments))
    assert without.peak_allocated_bytes == beside.peak_allocated_bytes


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
    assert memory.growth is not None
    assert memory.growth.line == line_of("leak.py", "kept by the graph")
    assert "hidden = model" in memory.growth.code
    batch, width = 32, 64
    assert memory.growth.bytes_per_step >= 4 * batch * (width + 4 * width)
    ends = [step.end_bytes for step in memory.steps]
    assert ends == sorted(set(ends))


def test_without_room_the_line_is_named_where_it_ends(tmp_path: Path) -> None:
    sizes = ("--width", 1024, "--layers", 8, "--batch", 4096)
    answer = rehearse(tmp_path, "plain_loop.py", *sizes, "--rows", 4096, "--length", 64, device=device(2 * GIB))
    assert answer.verdict is VerdictKind.REFUSED and answer.end is ScriptEnd.OUT_OF_MEMORY
    (ended,) = answer.out_of_memory
    assert not ended.caught and ended.line == line_of("plain_loop.py", "return self.head(")
    assert ended.message.startswith("CUDA out of memory. Tried to allocate ")
    assert "GPU 0 has a total capacity of 2.00 GiB" in ended.message


def test_a_script_that_halves_its_batch_goes_on(tmp_path: Path) -> None:
    sizes = ("--width", 1024, "--layers", 4, "--batch", 65536)
    answer = rehearse(tmp_path, "halves_batch.py", *sizes, device=device(GIB + GIB // 2))
    memory = memory_of(answer)
    assert [one.caught for one in answer.out_of_memory] == [True] * len(answer.out_of_memory)
    assert 1 <= len(answer.out_of_memory) <= 4
    assert len(memory.steps) == 3
    assert memory.min_cap_bytes <= GIB + GIB // 2


@pytest.mark.parametrize("options", [(), ("--reentrant",)], ids=["saved", "reentrant"])
def test_a_backward_pass_without_room_is_an_error_that_can_be_caught(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A checkpointed layer computes its forward within the backward pass, in the middle of autograd's C++."""
    sizes = ("--width", 1024, "--layers", 8, "--batch", 24576)
    answer = rehearse(tmp_path, "backward_out_of_memory.py", *sizes, *options, device=device(3 * GIB))
    memory = memory_of(answer)
    assert answer.out_of_memory
    assert all(one.caught for one in answer.out_of_memory)
    assert answer.out_of_memory[0].phase is StepPhase.BACKWARD
    assert len(memory.steps) == 3
    assert memory.min_cap_bytes <= 3 * GIB


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (
            "auto_batch_size.py",
            ["--output_dir", "out", "--width", 256, "--layers", 4, "--length", 256, "--batch", 256, "--rows", 512],
        ),
        (
            "accelerate_loop.py",
            ["--width", 256, "--layers", 4, "--vocabulary", 1000, "--length", 256, "--batch", 256, "--rows", 512],
        ),
    ],
)
def test_libraries_that_look_for_a_batch_size_find_it(tmp_path: Path, program: str, arguments: list[Any]) -> None:
    arguments = [str(tmp_path / "out") if word == "out" else word for word in arguments]
    answer = rehearse(tmp_path, program, *arguments, device=device(2 * GIB))
    memory = memory_of(answer)
    assert answer.out_of_memory and all(one.caught for one in answer.out_of_memory)
    assert [step.number for step in memory.steps][:3] == [1, 2, 3]
    assert memory.min_cap_bytes <= 2 * GIB


ENDS = {
    "fails.py": (ScriptEnd.FAILED, "ValueError: no such label: 7"),
    "fails_early.py": (ScriptEnd.FAILED, "KeyError: 'labels'"),
    "exits_early.py": (ScriptEnd.NO_STEP, ""),
    "no_step.py": (ScriptEnd.NO_STEP, ""),
    "asks.py": (ScriptEnd.FAILED, "EOFError"),
    "second_device.py": (ScriptEnd.FAILED, "invalid device ordinal"),
}


@pytest.mark.parametrize("program", ENDS)
def test_scripts_that_end_by_themselves(tmp_path: Path, program: str) -> None:
    end, text = ENDS[program]
    answer = rehearse(tmp_path, f"odd/{program}")
    assert answer.end is end, (answer.end, answer.traceback)
    assert text in answer.traceback
    assert answer.verdict is VerdictKind.UNKNOWN and answer.reasons


def test_a_status_of_its_own_is_told(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/exits.py")
    assert answer.end is ScriptEnd.FAILED
    assert "exit status 3" in answer.traceback


STRANGE = {
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
    "reads_checkpoint.py": 3,
}


@pytest.mark.parametrize("program", STRANGE)
def test_strange_scripts_are_followed(tmp_path: Path, program: str) -> None:
    answer = rehearse(tmp_path, f"odd/{program}")
    memory = memory_of(answer)
    check_sums(memory, f"odd/{program}")
    assert len(memory.steps) == STRANGE[program]
    assert memory.by_category[MemoryCategory.WEIGHTS] >= held_bytes((2, 8), (2,))


def test_what_a_graph_keeps_is_said_to_be_unknown(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/rare_calls.py")
    assert any("CUDA graph" in one.what for one in answer.unknown)


def test_what_only_a_device_could_run_is_no_failure_of_the_script(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/higher_order.py")
    assert answer.verdict is VerdictKind.UNKNOWN and answer.end is ScriptEnd.STOPPED
    (reason,) = answer.reasons
    assert reason.endswith("HigherOrderOperator flex_attention")
    (tmp_path / "two").mkdir()
    replicas = rehearse(tmp_path / "two", "odd/replicates.py", ranks=2)
    assert replicas.verdict is VerdictKind.UNKNOWN and replicas.end is ScriptEnd.STOPPED
    assert replicas.reasons == ("it copies the model to 2 devices at each step",)


def test_compiled_models_are_said_to_run_eagerly(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "odd/compiles.py")
    assert any("torch.compile" in text for text in (*answer.notes, *(one.what for one in answer.unknown)))


def test_its_own_allocator_settings_are_heeded(tmp_path: Path) -> None:
    memory = memory_of(rehearse(tmp_path, "odd/own_allocator.py"))
    # Segments grow, so that each larger batch reuses what the last one left; others would keep 90 MiB beside it.
    assert memory.peak_reserved_bytes - memory.peak_allocated_bytes < 30 * MIB


def test_what_an_evaluation_keeps_of_each_batch_is_named_with_its_line(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "gathers_logits.py", steps=2)
    kept = memory_of(answer).evaluation_growth
    assert kept is not None
    assert kept.line == line_of("gathers_logits.py", "kept for all batches") and "kept.append" in kept.code
    assert kept.bytes_per_batch == 4 * 64 * 4096 and kept.batches_left_out == 10 - 4
