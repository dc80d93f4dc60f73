"""Command lines of training scripts: what is the script's stays the script's, launchers are understood or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.processes.rehearsed_command import ScriptCommand, parse_command
from dryfit.settings.errors import ConfigError

ARGUMENTS = st.lists(st.text(max_size=12) | st.sampled_from(["--device", "-m", "--", "torchrun", "--steps=3"]))


def parsed(words: str | list[str], config: dict[str, object] | None = None) -> ScriptCommand:
    return parse_command(words.split() if isinstance(words, str) else words, lambda _: config or {})


@given(ARGUMENTS)
def test_what_follows_the_script_is_never_read(arguments: list[str]) -> None:
    own = tuple(arguments)
    assert parsed(["train.py", *own]) == ScriptCommand("train.py", None, own)
    assert parsed(["-m", "a.b", *own]) == ScriptCommand(None, "a.b", own)
    assert parsed(["python", "train.py", *own]) == ScriptCommand("train.py", None, own)
    launched = parsed(["accelerate", "launch", "--num_processes", "4", "train.py", *own])
    left = own[1:] if own[:1] == ("--",) else own  # a launcher takes it for the end of its own options
    command = parsed(["torchrun", "--nproc-per-node", "8", "train.py", *own])
    assert (command.script, command.module, command.arguments, command.ranks) == ("train.py", None, left, 8)
    command = parsed(["torchrun", "--nproc_per_node=2", "-m", "a.b", *own])
    assert (command.script, command.module, command.arguments, command.ranks) == (None, "a.b", left, 2)
    assert (launched.script, launched.arguments, launched.ranks) == ("train.py", left, 4)


def test_the_options_of_torchrun() -> None:
    assert parsed("torchrun train.py").ranks == 1
    assert parsed("torchrun train.py").environment["RANK"] == "0"
    assert parsed("torchrun --standalone --nnodes=1 --nproc-per-node=gpu train.py --lr 1").ranks is None
    assert parsed("python -m torch.distributed.run --nproc-per-node 8 --master-port 2 t.py").ranks == 8
    assert parsed("torchrun --nproc-per-node 2 -- train.py -x").arguments == ("-x",)
    assert parsed("torchrun --nproc-per-node 2 -m a.b -- --depth=12 -- x").arguments == ("--depth=12", "--", "x")
    assert parsed("torchrun -t 3 -r 1 --nproc-per-node 2 train.py").script == "train.py"


def test_the_options_of_accelerate() -> None:
    command = parsed("accelerate launch --mixed_precision bf16 --multi-gpu --num-processes 2 -m a.b --x 1")
    assert (command.module, command.arguments, command.ranks) == ("a.b", ("--x", "1"), 2)
    assert command.environment == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert parsed("accelerate launch train.py").environment == {"ACCELERATE_MIXED_PRECISION": "no"}
    sharded = parsed("accelerate launch --use_fsdp --fsdp_version 2 --fsdp_offload_params True --num_processes 8 t.py")
    assert sharded.environment["ACCELERATE_USE_FSDP"] == "true"
    assert (sharded.environment["FSDP_VERSION"], sharded.environment["FSDP_OFFLOAD_PARAMS"]) == ("2", "true")
    assert "FSDP_AUTO_WRAP_POLICY" not in sharded.environment


def test_a_config_file_of_accelerate() -> None:
    config: dict[str, object] = {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 8,
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "offload_params": False},
    }
    command = parsed("accelerate launch train.py", config)
    assert command.ranks == 8
    assert command.environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert command.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    own = parsed("accelerate launch --num_processes 2 --mixed_precision no --multi_gpu train.py", config)
    assert (own.ranks, own.environment) == (2, {"ACCELERATE_MIXED_PRECISION": "no"})
    with pytest.raises(ConfigError, match="4 machines"):
        parsed("accelerate launch train.py", {"num_machines": 4})


def test_deepspeeds_launcher_says_ranks_and_hands_over_the_rank() -> None:
    command = parsed("deepspeed --num_gpus 8 --master_port=1234 train.py --deepspeed ds.json")
    assert (command.script, command.ranks) == ("train.py", 8)
    assert command.arguments == ("--local_rank=0", "--deepspeed", "ds.json")
    assert command.environment["RANK"] == command.environment["LOCAL_RANK"] == "0"
    alone = parsed("deepspeed --no_local_rank --include localhost:0,2 --module a.b --x 1")
    assert (alone.module, alone.arguments, alone.ranks) == ("a.b", ("--x", "1"), 2)
    assert parsed("-m deepspeed.launcher.runner t.py").ranks is None


def test_accelerate_hands_deepspeed_its_options_and_those_of_its_file() -> None:
    config: dict[str, object] = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_processes": 8,
        "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True, "offload_optimizer_device": "cpu"},
    }
    command = parsed("accelerate launch train.py", config)
    said = {name: value for name, value in command.environment.items() if name.startswith("ACCELERATE")}
    assert command.ranks == 8
    assert said == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,zero3_init_flag,offload_optimizer_device,mixed_precision",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    }
    own = parsed("accelerate launch --use_deepspeed --deepspeed_config_file Z.json --num_processes 2 t.py")
    assert own.environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "Z.json"
    assert own.environment["ACCELERATE_CONFIG_DS_FIELDS"] == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no script was given"),
        ("-m", "no module follows -m"),
        ("--devcie rtx4090 train.py", "no option --devcie"),
        ("torchrun", "no script follows"),
        ("torchrun --nproc-per-node", "no value follows"),
        ("torchrun --nproc-per-node 0 t.py", "above zero"),
        ("torchrun --nnodes 2 t.py", "one machine"),
        ("torchrun --nnodes 1:4 t.py", "one machine"),
        ("torchrun --nproc-per-nod 8 t.py", "did you mean --nproc_per_node"),
        ("torchrun --no-python t.sh", "a Python script"),
        ("deepspeed --num_nodes 2 train.py", "several machines"),
        ("deepspeed --include worker-0@worker-1:0,1 train.py", "one machine"),
        ("deepspeed --autotuning tune train.py", "--autotuning"),
        ("deepspeed --no_python train.sh", "a Python script"),
        ("deepspeed --num_gpu 8 train.py", "no option --num_gpu"),
        ("accelerate config", "accelerate launch"),
        ("accelerate launch --use_megatron_lm t.py", "Megatron-LM"),
        ("accelerate launch --tpu t.py", "TPU"),
        ("accelerate launch --cpu t.py", "CUDA devices"),
        ("accelerate launch --num_machines 2 t.py", "2 machines"),
        ("accelerate launch --mixed_precision fp8 t.py", "fp16 or bf16"),
        ("accelerate launch --nonsense t.py", "no option --nonsense"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_by_name(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(words)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ("jupyter", "nbconvert", "--execute", "a.ipynb"),
        ("ipython", "a.py"),
        ("papermill", "a", "b"),
        ("-m", "nbconvert"),
    ],
)
def test_commands_that_run_notebooks_are_refused_by_name(words) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_command(words, lambda _: {})
    assert "notebooks" in str(raised.value) and "nbconvert" in raised.value.hint
