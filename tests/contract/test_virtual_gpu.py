"""Ordinary code on a virtual GPU, in a process of its own: what it sees is what a device would show it."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from dryfit.gpu.events import BLOCK_BYTES
from dryfit.gpu.recurrent import UNMEASURED
from rehearsed import SUPPORT, facts_of

pytestmark = pytest.mark.heavy
FACTS = SUPPORT / "virtual_facts.py"
HISTORIES = SUPPORT.parents[1] / "docs" / "measurements" / "gpu-histories-h200.jsonl"
WEIGHTS = ((1024, 512), (1024,), (512, 1024), (512,), (512, 512), (512,))
MIB = 2**20
GIB = 2**30


def fp32_bytes(*sizes: tuple[int, ...]) -> int:
    """Bytes of blocks of the allocator."""
    numbers = [size[0] * (size[1] if len(size) > 1 else 1) for size in sizes]
    return sum(-(-4 * number // BLOCK_BYTES) * BLOCK_BYTES for number in numbers)


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return facts_of("virtual_facts.py")


@pytest.fixture(scope="module")
def layers() -> dict[str, Any]:
    return facts_of("unusual_layers.py")


def test_the_device_is_there(facts: dict[str, Any]) -> None:
    assert facts["available"] == [True, 1, "1GiB"]
    assert facts["total"] == GIB


def test_tensors_without_values_are_saved_and_take_the_place_of_no_file(facts: dict[str, Any]) -> None:
    """By torch.save and safetensors, on the device and on the host, by renames and copies; values are saved as ever."""
    assert facts["files"] == [*[["TRACE", "of an earlier training"]] * 6, True, [0, 1, 2, 3]] * 2


def test_a_parameter_is_the_same_object_wherever_it_moves(facts: dict[str, Any]) -> None:
    assert facts["same_objects"]
    assert set(facts["moved"]) == {"cuda:0"}
    assert facts["weights"] == fp32_bytes(*WEIGHTS)


def test_an_optimizer_made_before_the_move_has_its_moments_on_the_device(facts: dict[str, Any]) -> None:
    workspaces = 2 * 8_519_680 + MIB  # one for the forward pass, with cuBLASLt's, one for autograd's own thread
    assert facts["with_state"] == 3 * fp32_bytes(*WEIGHTS) + workspaces


def test_inference_mode_takes_what_no_grad_does(facts: dict[str, Any]) -> None:
    plain, inference = facts["without_gradients"]
    assert plain[0] > fp32_bytes((8, 1024), (8, 1024))
    assert inference[0] == plain[0]
    assert plain[1] == [7, 3, 1, 1, 1]
    assert inference[1] == plain[1]


def test_known_values_stay_known_through_copies_and_arithmetic(facts: dict[str, Any]) -> None:
    assert facts["known"] == [[3, 1, 2], [7, 3, 5], 3, True]
    assert facts["chosen"] == [0, 2, 4]
    assert facts["mask"] == [False, 8]


def test_a_loop_over_elements_is_cheap(facts: dict[str, Any]) -> None:
    assert facts["elements"] == [True, 0]


@pytest.mark.parametrize("seed", ["1", "2"])
def test_values_that_are_known_are_those_of_the_same_program_on_the_cpu(seed: str) -> None:
    """Through views, writes by any of them, and writes of what nobody knows: 25 steps each, every tensor after each."""
    beside = facts_of("values_beside.py", seed, "40")
    assert beside["wrong"] == []
    assert beside["seen"] > 5000 and beside["known"] > 0.4 * beside["seen"]


def test_memory_is_that_of_the_storages_of_the_same_program_on_the_cpu() -> None:
    """Resized, set to others, swapped, viewed and dropped: random programs, compared after each step."""
    beside = facts_of("storages_beside.py")
    assert beside["steps"] > 2000 and beside["programs"] >= 300
    assert beside["error"].startswith("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert beside["after"] == [1024, 1024]


def test_flex_attention_takes_what_a_fused_kernel_does() -> None:
    facts = facts_of("flex_facts.py")
    kept, after = facts["sdpa"]
    assert facts["flex"] == facts["compiled"] == [kept - 1024, after]  # without two states of random numbers
    assert facts["grouped"] == [kept - 1024 + 4 * BLOCK_BYTES, after // 2]  # a mask of everything: four small tensors
    assert any("flex_attention" in note for note in facts["notes"])


def test_positions_that_nobody_knows_are_read_as_ones_and_are_no_longer_the_old_value(facts: dict[str, Any]) -> None:
    assert facts["written"] == [[7, 1, 2], [1, 1, 1]]
    assert facts["unknown"]


def test_lists_are_indices_and_values(facts: dict[str, Any]) -> None:
    assert facts["indexed"] == [[1, 9], 36, 0, [[-1, -1, 2, 3], [4, 5, 6, 7], [-1, -1, 10, 11]]]
    assert facts["listed"] == [3, 7]


def test_checks_of_values_pass(facts: dict[str, Any]) -> None:
    assert facts["back"] == [2, 400]
    assert facts["close"] == [True, 0]


def test_memory_of_the_host_is_pinned(facts: dict[str, Any]) -> None:
    assert facts["pinned"] == [False, True, [0, 1, 2, 3, 4], True, [True, True, True, [1.0, 2.0]]]
    assert facts["host_bytes"] == [16 * MIB, True, 16 * MIB, 8 * MIB]  # the second takes the first one's block


def test_a_copied_parameter_is_as_torchs(facts: dict[str, Any]) -> None:
    assert facts["copied"] == [False, True]


def test_large_masks_of_finite_numbers_are_known_until_they_are_written(facts: dict[str, Any]) -> None:
    assert facts["finite"] == [False, False, True, False, False, False, True]


def test_a_compiled_function_without_tensors_of_the_device_is_not_noted(facts: dict[str, Any]) -> None:
    assert facts["compiled"] == [False, 3, False]


def test_tensors_of_the_cpu_are_real(facts: dict[str, Any]) -> None:
    assert facts["real"] == [0, 2, 4, 6]
    assert {"backward"} <= set(facts["seen"]) and not {"shape", "device", "dtype"} & set(facts["seen"])


def test_errors_are_those_of_torch(facts: dict[str, Any]) -> None:
    (room, room_text), (ordinal, ordinal_text), (_mixed, mixed_text), (numpy, numpy_text) = facts["errors"]
    assert room == "OutOfMemoryError"
    assert room_text.startswith("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1024.00")
    assert ordinal == "AcceleratorError"
    assert "invalid device ordinal" in ordinal_text
    assert "Expected all tensors to be on the same device" in mixed_text
    assert numpy == "TypeError"
    assert "Use Tensor.cpu()" in numpy_text


def test_an_error_takes_no_memory_and_names_its_line(facts: dict[str, Any]) -> None:
    assert facts["after_error"]
    error = facts["out_of_memory"][0]
    assert error["code"].startswith("lambda: torch.empty(2**31")
    told = Path(error["line"].rpartition(":")[0])  # relative to where it was started, if it lies below
    assert told.absolute() == FACTS


def test_a_backward_pass_without_room_is_one_error(facts: dict[str, Any]) -> None:
    assert facts["within_backward"] == [1, 2]
    assert facts["after_backward"], "what it held is free once it was caught"
    assert len(facts["out_of_memory"]) == 3


def test_views_keep_their_block_and_copies_take_their_own(facts: dict[str, Any]) -> None:
    assert facts["block"] == [64 * MIB, 64 * MIB]
    assert facts["view_keeps"] == 64 * MIB
    assert facts["emptied"]
    assert facts["twin"] == fp32_bytes(*WEIGHTS)
    assert facts["twin_device"] == "cuda:0"
    assert set(facts["half"]) == {"torch.float16"}
    assert facts["host"] == "cpu"
    assert facts["freed"] == 0


def test_free_memory_is_what_context_and_allocator_leave(facts: dict[str, Any]) -> None:
    free, total = facts["free"]
    assert total == GIB
    assert 0 < free < total - 550 * MIB


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_recurrent_layers_run_on_padded_and_packed_sequences(layers: dict[str, Any], kind: str) -> None:
    lengths = [10, 7, 7, 2]
    assert layers[kind] == [["cuda:0"], [4, 10, 128], [sum(lengths), 128], [4, 10, 128], lengths]
    assert {what for what in layers["unknown"] if "cuDNN" in what} == {UNMEASURED}  # of RNN alone


def test_recurrent_layers_take_what_cudnn_took_on_an_h200() -> None:
    virtual, compared = facts_of("recurrent_layers.py"), 0
    for row in map(json.loads, HISTORIES.read_text("utf-8").splitlines()):
        if row["operator"] in ("LSTM", "GRU"):
            running = list(accumulate(row["bytes"]))
            kept, peak, of_backward = virtual[f"{row['operator']} torch.{row['inputs'].split()[-1]}"]
            if row["pass"] == "forward":
                assert abs(kept - running[-1]) < MIB  # less than a block that is not cut from its segment
            assert (peak if row["pass"] == "forward" else of_backward) == pytest.approx(max(running), rel=0.01)
            compared += 1
    assert compared == 8


def test_without_cudnn_a_layer_runs_cell_by_cell(layers: dict[str, Any]) -> None:
    rows, length, hidden = 4, 10, 64
    numbers = length * rows * hidden * (1 + 5 + 1)  # each state, the workspace of its cell, and all states as one
    assert numbers * 4 <= layers["cells"] <= numbers * 4 * 2


def test_lazy_layers_get_their_shapes_on_the_device_as_the_same_objects(layers: dict[str, Any]) -> None:
    assert layers["lazy"] == layers["on the device"] == [["cuda:0"]]
    assert layers["lazy shapes"] == [[8, 3, 3, 3], [8], [8], [8], [3, 8 * 6 * 6], [3]]
    assert layers["lazy types"] == ["torch.float16 FakeTensor", "torch.int64 FakeTensor"]
    assert layers["same objects"]


@pytest.mark.parametrize("way", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_parametrisations_of_a_layer_on_the_device(layers: dict[str, Any], way: str) -> None:
    assert layers[way] == [["cuda:0"]]
    assert any(what.startswith("aten.geqrf.default: scratch memory") for what in layers["unknown"])


def test_a_librarys_weight_is_made_again_of_its_attributes(layers: dict[str, Any]) -> None:
    assert layers["coded"] == ["Coded", True, "nf4", "cuda:0"]


def test_a_real_tensor_whose_data_are_set_to_one_of_the_device_is_there_itself(layers: dict[str, Any]) -> None:
    assert layers["set"] == ["cuda:0", "cuda:0", True, "kept"]
