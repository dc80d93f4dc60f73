"""Fake CUDA tensors: what they promise, in a process without a device. Each fact comes from a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import fake_cuda_facts
import tiny
import tiny_lms
import warm
from parts import need_package

MIB = 2**20
Fact = Callable[..., Any]


@pytest.fixture(scope="module")
def fact() -> Iterator[Fact]:
    """Have a fact found, by a process that was started from nothing: what memory it takes is one of them."""
    with subprocess.Popen(
        [sys.executable, fake_cuda_facts.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {warm.COLD_VARIABLE: "1"},
    ) as server:
        assert server.stdin is not None and server.stdout is not None

        def find(*words: str | Path) -> Any:
            print(json.dumps([str(word) for word in words]), file=server.stdin, flush=True)
            found = json.loads(server.stdout.readline())
            assert found is not None, f"{words}: standard error says why"
            return found

        yield find
        server.stdin.close()


def test_this_build_of_torch_passes_its_own_test_and_no_context_is_made(fact: Fact) -> None:
    assert fact("selftest") == {"why_not": "", "available": False, "initialized": False}


def test_attention_takes_the_kernel_of_the_device_and_its_backward_works(fact: Fact) -> None:
    found = fact("attention")
    assert len(found) == 18
    for name, node in found.items():
        major, _, dtype, masked = name.split("-")
        if dtype == "float32" or (major == "7" and dtype == "float16"):
            expected = "Efficient"
        elif major == "7":
            expected = ""  # no kernel for bf16: matrix products
        else:
            expected = "Efficient" if masked == "True" else "Flash"
        assert node.startswith(f"ScaledDotProduct{expected}" if expected else "ToCopy"), (name, node)


def test_what_is_one_kernel_on_a_device_is_one_operator(fact: Fact) -> None:
    assert fact("activations") == {
        "silu": ["aten::silu_backward"],
        "mish": ["aten::mish_backward"],
        "rms_norm": ["aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"],
    }


def test_inputs_of_layers_leave_the_device_and_are_counted_on_the_host(fact: Fact, tmp_path: Path) -> None:
    layers, hidden = 6, 64
    found = fact("offloaded", tiny.model(tmp_path, hidden_size=hidden, num_hidden_layers=layers))
    rows, length = fake_cuda_facts.SHAPE.rows, fake_cuda_facts.SHAPE.length
    inputs_bytes = rows * length * hidden * 4  # the output of a layer's norm is fp32 under autocast
    assert found["host"].count(inputs_bytes) == layers
    assert found["left on the host"] == 0
    assert found["kept again"] == found["kept"]
    moved_bytes = found["kept"] - found["moved"]
    assert layers * inputs_bytes <= moved_bytes <= sum(found["host"])


@pytest.mark.parametrize(
    ("precision", "checkpointing", "optimizer"),
    [
        ("bf16", "yes", "adafactor"),
        *[
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("fp32", "no", "sgd"), ("bf16", "no", "adamw"), ("fp16", "yes", "adamw"))
        ],
    ],
)
def test_a_run_put_together_from_segments_is_the_run(
    fact: Fact, tmp_path: Path, precision: str, checkpointing: str, optimizer: str
) -> None:
    found = fact("composed", tiny.model(tmp_path), precision, checkpointing, optimizer)
    composed, recorded = found["composed"], found["recorded"]
    assert recorded["backward"] > 500_000
    for phase, size in composed.items():
        assert abs(size - recorded[phase]) <= 12, phase  # fp16: the scale itself, two numbers; the last loss


def test_other_models_of_the_process_are_not_followed(fact: Fact, tmp_path: Path) -> None:
    assert fact("followed", tiny.model(tmp_path)) == {"traced": True, "other": False}


@pytest.mark.parametrize(
    ("kind", "says"), [("values", ("aten.bincount", "fake_cuda_facts.py:")), ("kernel", ("made_up.kernel",))]
)
def test_what_cannot_be_traced_is_named(fact: Fact, kind: str, says: tuple[str, ...]) -> None:
    message = fact("refused", kind)
    assert all(word in message for word in says), message


@pytest.mark.parametrize(("name", "bytes_"), [("paged_adamw", 4), ("paged_adamw8bit", 1)])
def test_the_moments_of_large_weights_are_paged_to_the_host(fact: Fact, tmp_path: Path, name: str, bytes_: int) -> None:
    folder = tiny.model(tmp_path, vocab_size=5000)  # the embeddings are large, and nothing else is
    config = AutoConfig.from_pretrained(folder)
    embedded = config.vocab_size * config.hidden_size
    found, whole = fact("paged", folder, name), fact("paged", folder, name.removeprefix("paged_"))
    assert found["host"] == 2 * bytes_ * embedded and whole["host"] == 0
    assert found["device"] == whole["device"] - found["host"]


def test_the_matrix_of_each_product_with_a_quantised_base_is_counted(fact: Fact, tmp_path: Path) -> None:
    need_package("bitsandbytes")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_lms.config_alone(tmp_path)))
    layers = {name: one for name, one in model.named_modules() if type(one) is nn.Linear and name != "lm_head"}
    matrices = {name: 2 * one.weight.numel() for name, one in layers.items()}  # bf16
    # What the frozen embeddings feed needs no gradient of its input.
    later = {
        name: size
        for name, size in matrices.items()
        if not name.startswith("model.layers.0.self_attn") or "o_proj" in name
    }
    found = fact("quantised", tmp_path, "nf4")
    for phase, wanted in (("forward", matrices), ("backward", later)):
        assert sorted(size for op, size in found[phase] if "dequantize_4bit" in op) == sorted(wanted.values()), phase
    tokens = fake_cuda_facts.SHAPE.rows * fake_cuda_facts.SHAPE.length
    integers = [size for op, size in fact("quantised", tmp_path, "int8")["forward"] if "int8_linear_matmul" in op]
    assert sorted(integers) == sorted(4 * tokens * one.out_features for one in layers.values())


@pytest.mark.parametrize(
    ("model", "rows", "length", "expected_mib"),
    # Traced once by an independent study of the same operators, with its own recorder.
    [
        pytest.param("bert-base-uncased", 16, 512, 4756 - 63, marks=pytest.mark.nightly),
        pytest.param("bert-large-uncased", 16, 512, 12873, marks=pytest.mark.nightly),
        ("microsoft/deberta-v3-large", 16, 512, 33075),
    ],
)
def test_known_peaks(fact: Fact, model: str, rows: int, length: int, expected_mib: float) -> None:
    found = fact("large", model, str(rows), str(length), "bf16", "no")
    assert found["peak_bytes"] / MIB == pytest.approx(expected_mib, rel=0.001)
    assert found["rss_bytes"] < 2**29


@pytest.mark.nightly
def test_seven_billion_weights_are_traced_in_less_than_half_a_gibibyte(fact: Fact) -> None:
    found = fact("large", "Qwen/Qwen2.5-7B", "1", "512", "bf16", "lora")
    assert found["peak_bytes"] > 20e9
    assert found["rss_bytes"] < 2**29
