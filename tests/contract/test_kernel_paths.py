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


def test_a_triton_kernel_takes_nothing_and_its_outputs_are_unknown() -> None:
    facts = facts_of("triton_stand_in.py")
    assert facts["known"] == [[0, 1, 2, 3], [1, 1, 1, 1]]
    assert facts["taken"] == 0
    assert facts["after"] == [0, 0, 0, 0]
    (note,) = facts["notes"]
    assert "fused" in note


def test_layers_on_the_host_take_nothing_of_the_device() -> None:
    assert facts_of("kernel_paths.py", "host") == {"device": "cpu", "most": 0}
