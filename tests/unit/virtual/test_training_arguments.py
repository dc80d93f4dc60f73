"""The ``TrainingArguments`` that a script makes are seen, and replaced, in the names of the installed transformers."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.heavy

CODE = """
import dataclasses, json, sys
from dryfit.virtual.script.training_arguments import ArgumentWatch

watch = ArgumentWatch(json.loads(sys.argv[1]))
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

kind, *arguments = sys.argv[2:]
if kind == "parsed":
    (made,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
else:
    made = (Derived if kind == "derived" else TrainingArguments)(per_device_train_batch_size=6)
TrainingArguments(per_device_train_batch_size=99)
other = {name: getattr(made, name) for name in watch.seen.values}
print(json.dumps([watch.seen.model_dump(mode="json"), {k: str(v) for k, v in other.items()}]))
"""


def made(kind: str, overrides: str = "{}", *arguments: str) -> tuple[dict, dict]:
    import json

    command = [sys.executable, "-W", "ignore", "-c", CODE, overrides, kind, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen, values = json.loads(done.stdout.splitlines()[-1])
    return seen, values


def test_values_of_a_command_line_are_seen() -> None:
    seen, _ = made("parsed", "{}", "--per_device_train_batch_size", "4", "--output_dir", "x")
    assert seen["from_command_line"] is True
    assert seen["values"]["per_device_train_batch_size"] == 4
    assert seen["values"]["optim"] == "adamw_torch_fused"
    assert seen["checkpointing"] in ("activation_checkpointing", "gradient_checkpointing")
    assert seen["values"][seen["checkpointing"]] is False


def test_values_are_replaced_and_nothing_else() -> None:
    overrides = '{"per_device_train_batch_size": 2, "optim": "adafactor", "activation_checkpointing": true, "no": 1}'
    seen, values = made("own", overrides)
    assert seen["from_command_line"] is False
    assert values["per_device_train_batch_size"] == "2"
    assert "adafactor" in values["optim"].lower()
    assert values[seen["checkpointing"]] == "True"
    assert values["gradient_accumulation_steps"] == "1"


def test_a_derived_class_has_its_own_defaults_first() -> None:
    seen, _ = made("derived")
    assert (seen["values"]["bf16"], seen["values"][seen["checkpointing"]]) == (False, True)
    changed, _ = made("derived", '{"activation_checkpointing": false}')
    assert changed["values"][seen["checkpointing"]] is False
