"""Kernels that code chooses by itself are on a virtual GPU those that it chooses on a GPU."""

from typing import Any

import pytest

from rehearsed import facts_of

pytestmark = pytest.mark.heavy
ONE_BY_ONE = {"Adafactor", "LBFGS", "Muon"}
"""Optimizers of torch that take lists of tensors only where they are asked to, or never; SparseAdam is the fourth."""


def test_default_optimizers_clipping_and_averaging_take_lists_of_tensors() -> None:
    """As torch's rule says for tensors on CUDA devices (``_default_to_fused_or_foreach``)."""
    lists = facts_of("kernel_paths.py", "optimizers")
    assert {name for name, taken in lists.items() if not taken} == ONE_BY_ONE
    assert {"AdamW", "SGD", "clip_grad_norm_", "clip_grad_value_", "average"} <= lists.keys()


@pytest.fixture(scope="module")
def attention() -> dict[str, Any]:
    return facts_of("kernel_paths.py", "attention")


@pytest.mark.parametrize("batch", ["alone", "ones"])
def test_causal_attention_without_padding_has_no_mask(attention: dict[str, Any], batch: str) -> None:
    assert attention[batch] == [{"mask": False, "causal": True}]


@pytest.mark.parametrize("batch", ["padded", "packed", "unknown"])
def test_padding_packed_sequences_and_unknown_masks_have_one(attention: dict[str, Any], batch: str) -> None:
    assert attention[batch] == [{"mask": True, "causal": False}]


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    return facts_of("triton_stand_in.py")


def test_a_triton_kernel_takes_nothing_and_its_outputs_are_unknown(kernels: dict[str, Any]) -> None:
    assert kernels["known"] == [[0, 1, 2, 3], [1, 1, 1, 1]]
    assert kernels["taken"] == 0
    assert kernels["after"] == [1, 1, 1, 1]  # what nobody knows
    (note,) = kernels["notes"]
    assert "fused, tuned, multiplies" in note
    assert kernels["grids"] == [[4, 8]]  # with what was left out, too


def test_an_autotuner_takes_the_first_configuration_and_its_benchmark_a_buffer(kernels: dict[str, Any]) -> None:
    assert kernels["tried"] == ["128 warps 2"] and kernels["best"] == {"BLOCK": 128}
    assert kernels["tuning"] == 256 * 2**20 + 4 * 2**20  # and a copy of what is restored
    assert kernels["kept by tuning"] == 0
    assert kernels["benchmark"] == 1.0


def test_a_kernel_refuses_what_triton_does(kernels: dict[str, Any]) -> None:
    assert kernels["host"] == "ValueError: Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"
    assert kernels["lacks"].startswith("TypeError: missing") and "'y'" in kernels["lacks"]


def test_tritons_driver_tells_the_device(kernels: dict[str, Any]) -> None:
    assert kernels["target"] == ["cuda", 89, 32]
    assert kernels["properties"] == [128, 101376]
    assert kernels["registers"] > 0
    assert kernels["powers"] == [1, 8, 8]


def test_the_body_of_an_operator_of_triton_kernels_is_counted(kernels: dict[str, Any]) -> None:
    assert kernels["operator"] == [2**20, 5 * 2**20]  # its output, and scratch beside it
    assert kernels["gradient"] == kernels["operator without fake"] == [2**18]


def test_products_in_a_triton_kernel_are_not_timed(kernels: dict[str, Any]) -> None:
    assert [kernels["untimed before"], kernels["untimed"]] == [False, True]


def test_layers_on_the_host_take_nothing_of_the_device() -> None:
    assert facts_of("kernel_paths.py", "host") == {"device": "cpu", "most": 0}
