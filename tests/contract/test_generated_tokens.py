"""Text that a rehearsed script generates: as long as it may be, and of a long one only both ends are made."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.rehearsal_messages import ScriptEnd
from rehearsed import GIB, MIB, device, facts_of, rehearse

pytestmark = pytest.mark.slow
PROMPT = 12
NIGHTLY = pytest.mark.nightly


def generated(architecture: str, tokens: int, *, leave_out: bool = True, **asked: Any) -> dict[str, Any]:
    asked |= {"architecture": architecture, "tokens": tokens, "leave_out": leave_out}
    return facts_of("generating.py", json.dumps(asked))


@pytest.mark.parametrize(
    ("architecture", "padded"),
    [
        ("gemma3_text", True),
        ("t5", True),
        *(pytest.param(*one, marks=NIGHTLY) for one in (("qwen2", True), ("gpt2", False))),
    ],
)
def test_both_ends_of_a_sequence_take_what_the_whole_one_takes(architecture: str, padded: bool) -> None:
    """Of gemma's layers most have a cache that slides over 16 tokens."""
    both, whole = (generated(architecture, 40, leave_out=leave_out, padded=padded) for leave_out in (True, False))
    assert (both["left_out"], whole["left_out"]) == (40 - (11 if "gemma" in architecture else 7), 0)
    assert both["shape"] == whole["shape"] == [4, (1 if architecture == "t5" else PROMPT) + 40]
    assert both["tokens"] == whole["tokens"]
    assert abs(both["allocated"] - whole["allocated"]) <= 32 * 1024 + 0.0001 * whole["allocated"]
    assert abs(both["reserved"] - whole["reserved"]) <= 2 * MIB
    assert both["flops"] == pytest.approx(whole["flops"], rel=1e-4)
    assert both["bytes"] == pytest.approx(whole["bytes"], rel=0.02)


@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("qwen2", marks=NIGHTLY)])
def test_a_cache_that_grows_leaves_the_blocks_behind_that_it_would(architecture: str) -> None:
    """No block of a cache serves the next token's: most of what is reserved is such blocks."""
    both, whole = (generated(architecture, 120, leave_out=leave_out, rows=512) for leave_out in (True, False))
    assert both["left_out"] == 120 - 7 and whole["left_out"] == 0
    assert abs(both["reserved"] - whole["reserved"]) <= 2 * MIB
    ids_and_mask = 2 * 512 * (PROMPT + 120) * 8  # of the sequence that is continued
    assert abs(both["allocated"] - whole["allocated"]) <= ids_and_mask
    assert whole["reserved"] > 4 * whole["allocated"]


@pytest.mark.parametrize("architecture", ["qwen2", pytest.param("t5", marks=NIGHTLY)])
def test_a_sequence_that_is_returned_with_its_cache_is_shortened_too(architecture: str) -> None:
    options = {"return_dict_in_generate": True}
    both, whole = (generated(architecture, 40, leave_out=leave_out, generate=options) for leave_out in (True, False))
    assert (both["left_out"], whole["left_out"]) == (40 - 7, 0)
    assert both["shape"] == whole["shape"] and both["cached"] == whole["cached"]
    assert abs(both["allocated"] - whole["allocated"]) <= 32 * 1024 + 0.0001 * whole["allocated"]
    assert both["flops"] == pytest.approx(whole["flops"], rel=1e-4)


def test_a_sequence_without_a_cache_is_shortened_too() -> None:
    """Of its cost the share of attention grows with the square of its length."""
    options = {"use_cache": False}
    both, whole = (generated("qwen2", 40, leave_out=leave_out, generate=options) for leave_out in (True, False))
    assert (both["left_out"], whole["left_out"]) == (40 - 7, 0)
    assert both["shape"] == whole["shape"]
    assert abs(both["allocated"] - whole["allocated"]) <= 32 * 1024 + 0.0001 * whole["allocated"]
    assert both["flops"] == pytest.approx(whole["flops"], rel=0.01)


def test_scores_of_every_token_are_made_where_they_are_returned() -> None:
    assert generated("qwen2", 30, generate={"return_dict_in_generate": True, "output_scores": True})["left_out"] == 0


WAYS: dict[str, dict[str, Any]] = {
    "without gradients": {"inference": True},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several of a prompt": {"num_return_sequences": 2, "do_sample": True},
}


@pytest.mark.every(2)
@pytest.mark.parametrize("way", WAYS)
def test_no_sequence_ends_before_its_longest_length(way: str) -> None:
    made = generated("qwen2", 30, generate=WAYS[way])
    rows = 4 * WAYS[way].get("num_return_sequences", 1)
    assert made["shape"] == [rows, PROMPT + 30]
    assert made["tokens"] is not None and not {0, 1} & set(made["tokens"])  # no padding, no end
    assert made["left_out"] == (0 if "beams" in way else 30 - 7)
    assert made["notes"] == [
        "which tokens a model chooses is not known: each generated sequence is as long as it may be"
    ]
    assert set(made["unknown"]) <= {"a condition on values; it was taken as true"}
    assert not made["unknown"] or "beams" in way


def test_a_criterion_of_the_script_ends_it_where_it_says() -> None:
    most = 11
    made = generated("qwen2", 200, stops_after=most)
    assert (made["shape"], made["left_out"]) == ([4, PROMPT + most], 0)


# ---- models that are placed automatically


@pytest.mark.parametrize("quantised", [False, pytest.param(True, marks=NIGHTLY)])
def test_a_model_that_would_be_left_in_host_memory_in_part_does_not_fit(tmp_path: Path, quantised: bool) -> None:
    """Told once with the device's limit; what it needs, without one. Of the model only the config is there."""
    size = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 5504}
    layers = 48 if quantised else 8  # 1.2 GiB in nf4, 1.5 GiB in fp32
    AutoConfig.for_model("llama", vocab_size=4000, num_hidden_layers=layers, **size).save_pretrained(tmp_path / "model")
    words = [str(tmp_path / "model"), *(["--quantised"] if quantised else [])]
    small = device(3 * GIB // 2)
    answer = rehearse(tmp_path, "odd/placed.py", *words, device=small)
    assert answer.end is ScriptEnd.OUT_OF_MEMORY, answer.traceback
    (failed,) = answer.out_of_memory
    assert 'with device_map="auto" the model takes' in failed.message
    assert failed.code.startswith("model = AutoModelForCausalLM.from_pretrained(")
    (tmp_path / "again").mkdir()
    whole = rehearse(tmp_path / "again", "odd/placed.py", *words, device=small, unlimited=True)
    assert whole.end is ScriptEnd.FINISHED and whole.memory is not None and whole.verdict is VerdictKind.REFUSED
    assert 0.9 * failed.requested_bytes < whole.memory.peak_allocated_bytes < 1.3 * failed.requested_bytes + 100 * MIB
