"""The ``TrainingArguments`` that a script makes are seen, and replaced, in the names of the installed transformers."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.heavy

CASES = {
    "parsed": ({}, ["--per_device_train_batch_size", "4", "--output_dir", "x"]),
    "own": (
        {"per_device_train_batch_size": 2, "optim": "adafactor", "activation_checkpointing": True, "no": 1},
        [],
    ),
    "derived": ({}, []),
    "derived, replaced": ({"activation_checkpointing": False}, []),
}
CODE = f"""
import dataclasses, json, os, sys
from dryfit.gpu.training_arguments import ArgumentWatch

watch = ArgumentWatch({{}})
watch.install()
assert "transformers" not in sys.modules
from transformers import HfArgumentParser, TrainingArguments

@dataclasses.dataclass
class Derived(TrainingArguments):
    bf16: bool | None = None
    gradient_checkpointing: bool = True

    def __post_init__(self):
        self.bf16 = bool(self.bf16)
        super().__post_init__()

for name, (overrides, arguments) in {CASES!r}.items():
    if not os.fork():
        watch.overrides = overrides
        if name == "parsed":
            (made,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
        else:
            made = (TrainingArguments if name == "own" else Derived)(per_device_train_batch_size=6)
        TrainingArguments(per_device_train_batch_size=99)
        other = {{name: str(getattr(made, name)) for name in watch.seen.values}}
        print(json.dumps([name, watch.seen.model_dump(mode="json"), other]), flush=True)
        os._exit(0)
    os.wait()
"""
Made = dict[str, tuple[dict, dict[str, str]]]


@pytest.fixture(scope="module")
def made() -> Made:
    """What is seen of each, and the values that each came to have, as texts."""
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {name: (seen, values) for name, seen, values in lines}


def test_values_of_a_command_line_are_seen(made: Made) -> None:
    seen, _ = made["parsed"]
    assert seen["from_command_line"] is True
    assert seen["values"]["per_device_train_batch_size"] == 4
    assert seen["values"]["optim"] == "adamw_torch_fused"
    assert seen["checkpointing"] in ("activation_checkpointing", "gradient_checkpointing")
    assert seen["values"][seen["checkpointing"]] is False


def test_values_are_replaced_and_nothing_else(made: Made) -> None:
    seen, values = made["own"]
    assert seen["from_command_line"] is False
    assert values["per_device_train_batch_size"] == "2"
    assert "adafactor" in values["optim"].lower()
    assert values[seen["checkpointing"]] == "True"
    assert values["gradient_accumulation_steps"] == "1"


def test_a_derived_class_has_its_own_defaults_first(made: Made) -> None:
    seen, _ = made["derived"]
    assert (seen["values"]["bf16"], seen["values"][seen["checkpointing"]]) == (False, True)
    changed, _ = made["derived, replaced"]
    assert changed["values"][seen["checkpointing"]] is False
