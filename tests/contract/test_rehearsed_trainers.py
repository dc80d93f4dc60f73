"""Trainers of transformers and TRL, on a virtual GPU: unmodified programs, and the script that TRL ships."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from dryfit.processes.rehearsed_command import parse_command
from dryfit.settings.memory_terms import MemoryCategory
from parts import need_package
from rehearsed import rehearse
from rehearsed_memory import memory_of, takes_three_steps

pytestmark = pytest.mark.slow
SFT = "trl.scripts.sft"
RUNS: dict[str, tuple[str, list[Any]]] = {
    "causal": ("causal_lm_trainer.py", ["--output_dir", "out"]),
    "sft": ("sft_lora.py", ["--output_dir", "out"]),
    "dpo in 8 bits": ("dpo_lora.py", ["--output_dir", "out", "--optim", "adamw_8bit"]),
    "grpo": ("grpo.py", ["--output_dir", "out"]),
}
NEED_TRL = ("sft", "dpo in 8 bits", "grpo")
AT_NIGHT = ("sft", "grpo")


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.nightly) if run in AT_NIGHT else run for run in RUNS]
)
def test_unmodified_trainers_run_to_the_third_step(tmp_path: Path, run: str) -> None:
    if run in NEED_TRL:
        need_package("trl")
    takes_three_steps(tmp_path, *RUNS[run])


def test_trl_has_the_kernels_that_it_has_on_a_gpu(tmp_path: Path) -> None:
    need_package("trl")
    answer = rehearse(tmp_path, "sft_lora.py", "--output_dir", tmp_path / "out")
    assert answer.went_through, answer.traceback
    assert torch.version.cuda or any("(TRL's kernels on a GPU)" in one for one in answer.assumed)
    assert not any("looked for triton" in note for note in answer.notes)


@pytest.mark.parametrize(
    ("program", "arguments", "steps", "epoch_steps", "source"),
    [
        # 16 rows in batches of 2, two a step; two epochs of Lightning with 32 rows in batches of 4.
        ("causal_lm_trainer.py", ("--output_dir", "out"), None, 4, "TrainingArguments"),
        ("lightning_module.py", ("--output_dir", "out"), 16, 8, "Lightning"),
        ("plain_loop.py", (), None, 8, ""),
    ],
)
def test_how_long_a_script_would_train_is_known(tmp_path, program, arguments, steps, epoch_steps, source) -> None:
    run = rehearse(tmp_path, program, *arguments).run
    assert run is not None and run.source == source and run.epoch_steps == epoch_steps
    assert run.steps == steps if steps or not source else run.steps and run.steps % epoch_steps == 0
    assert run.batch_share == 1.0  # rows of one length


def test_a_script_that_ends_by_itself_is_as_long_as_it_was(tmp_path: Path) -> None:
    run = rehearse(tmp_path, "plain_loop.py", steps=1000).run
    assert run is not None and run.source == "the script" and run.steps is not None and run.steps > 3


ADAPTERS = ("--use_peft", "--lora_target_modules", "all-linear", "--gradient_accumulation_steps", "2")
SHARDED = (
    "accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
)


@pytest.mark.parametrize(
    "launcher",
    [pytest.param([], marks=pytest.mark.nightly, id="alone"), pytest.param(SHARDED.split(), id="sharded")],
)
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
