"""Kernels of other packages take what hand counts of outputs, saved tensors and scratch say."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dryfit.settings.rehearsal_messages import ScriptEnd
from rehearsed import facts_of, rehearse

pytestmark = pytest.mark.heavy
MIB = 2**20
TOKENS = 4 * 1024
PROBLEM = TOKENS * 16 * 64 * 2
"""Bytes of queries of 4 rows of 1024 tokens, 16 heads 64 wide."""
SUMS = TOKENS * 16 * 4
STATE = 1024
"""Of random numbers: two blocks."""
SCRATCH = 16 * (64 + 1) * 4
"""Bytes for each token of a backward pass: a row of the query's gradient, and a sum, for each head in fp32."""


@pytest.fixture(scope="module")
def attention() -> dict[str, Any]:
    return facts_of("stand_in_facts.py", "attention")


@pytest.fixture(scope="module")
def others() -> dict[str, Any]:
    return facts_of("stand_in_facts.py", "others")


@pytest.mark.parametrize("name", ["dense", "packed", "packed keys", "third", "triangle"])
def test_flash_attention_keeps_output_and_sums(attention: dict[str, Any], name: str) -> None:
    kept = PROBLEM + SUMS + STATE
    assert attention[name] == [kept, kept, 3 * PROBLEM + TOKENS * SCRATCH]


def test_fewer_heads_of_keys_have_gradients_for_each_head_of_queries(attention: dict[str, Any]) -> None:
    kept = PROBLEM + SUMS + STATE
    gradients = PROBLEM + 2 * PROBLEM // 4
    assert attention["few heads"] == [kept, kept, gradients + TOKENS * SCRATCH + 2 * PROBLEM]


def test_rows_of_other_lengths_have_a_block_more_each(attention: dict[str, Any]) -> None:
    kept = PROBLEM + SUMS + STATE
    backward = 3 * PROBLEM + (TOKENS + 3 * 128) * SCRATCH
    assert attention["other lengths"] == [kept, kept, backward]
    begins = 2 * 512  # where rows begin, of queries and of keys
    assert attention["blocks"] == [kept + begins, kept + begins, backward]


def test_attention_in_fp32_goes_to_the_memory_efficient_kernel(attention: dict[str, Any]) -> None:
    assert attention["single"][0] == 2 * PROBLEM + SUMS + STATE
    assert attention["fp32"] == "FlashAttention only support fp16 and bf16 data type"


def test_rows_side_by_side_are_those_of_a_list(attention: dict[str, Any]) -> None:
    assert attention["listed"] == [[1, 2000, 16, 64], [1, 1000, 16, 64], [2, 500, 16, 64]]
    sums = 3 * 16 * 2624 * 4  # of the longest of three rows, in blocks of 32
    assert attention["blocks in 32 bits"][0] == 2 * PROBLEM + sums + STATE + 2 * 512


def test_other_kernels_of_flash_attention(attention: dict[str, Any]) -> None:
    assert attention["rotary in place False"] == [PROBLEM] * 3
    assert attention["rotary in place True"] == [0, 0, PROBLEM]  # the gradient that is passed on
    parts = 8 * attention["multiprocessors"] * 1024 * 4  # of a weight's gradient, in fp32
    total = 2 * PROBLEM  # of the residual, in fp32
    for name, kept, backward in (
        ("layer norm", PROBLEM + 2 * TOKENS * 4, PROBLEM + 2 * parts),
        ("residual norm", PROBLEM + total + TOKENS * 4, PROBLEM + total + parts),
    ):
        assert attention[name][:2] == [kept, kept]
        assert 0 < attention[name][2] - backward < MIB  # the sum of the parts
    numbers = TOKENS * 4
    assert attention["loss"] == [3 * numbers, 3 * numbers, TOKENS * 32000 * 2 + numbers]


def test_padding_is_taken_out_and_put_back(attention: dict[str, Any]) -> None:
    assert attention["unpadded"] == [[3584, 8], [0, 512, 1536, 2560, 3584], 1024, [512, 1024, 1024, 1024]]
    assert attention["padded"] == [4, 1024, 8]


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_transformers_passes_what_rows_with_padding_need(attention: dict[str, Any], name: str) -> None:
    """It passes only parameters that it finds in a function's signature."""
    assert attention[name] == [2, 32, 99]


def test_state_space_models(others: dict[str, Any]) -> None:
    tokens, weights, bias = 4 * 512 * 1024 * 2, 512 * 4 * 2, 512 * 2
    assert others["convolution"] == [tokens, tokens, tokens + 3 * (weights + bias)]
    states, decay, parameters = 4 * 512 * 2 * 16 * 4, 512 * 16 * 4, 2 * 512 * 4
    inputs = 2 * 4 * 16 * 1024 * (4 + 2)  # gradients of B and C in fp32, then in 16 bits
    kept = 2 * tokens + states
    assert others["scan"] == [kept, kept, 3 * tokens + decay + parameters + inputs]


def test_mamba_2_scans_chunks(others: dict[str, Any]) -> None:
    out, steps, products, state = (
        8 * MIB,
        MIB // 4,
        4 * MIB,
        2 * MIB,
    )  # the last two: 256 x 256 for each of 16 chunks in fp32
    states, shared = 4 * MIB, MIB  # of each chunk, B or C, in 16 bits
    kept, most = out + steps, out + 2 * steps + states + state + products
    buffer = 256 * MIB  # of the autotuner's benchmark, in the first call
    parts = 6  # heads of the one group are summed by threes: 256 chunks of heads on 108 multiprocessors
    gradients = out + 2 * shared + TOKENS * 32  # of x, B and C, and time steps
    again = TOKENS * 32 + 2 * steps + products + state + 2 * states
    scratch = 3 * steps + 2 * 2 * shared + parts * products
    small = 1024 + 512  # a number for each chunk and head; D's gradient
    assert others["chunks"] == [kept, most, gradients + again + scratch + products + small]
    assert others["tuned chunks"] == [kept, most + buffer, gradients + again + scratch + buffer + small]


def test_the_gated_norm_of_mamba_2(others: dict[str, Any]) -> None:
    kept, sums = 8 * MIB + TOKENS * 4, 108 * 1024 * 4 + 4096 + 2048  # of 108 multiprocessors; their sum, in 16 bits
    assert others["gated norm"] == [kept, kept, 16 * MIB + sums]


def test_the_fused_layer_of_mamba_2(others: dict[str, Any]) -> None:
    inner, mixed, out = 8 * MIB, 10 * MIB, 4 * MIB
    kept = inner + TOKENS * 4 + out
    scan = 2 * MIB // 4 + 4 * MIB + 2 * MIB  # steps, states and the last state, while the output is projected
    assert others["whole"][:2] == [kept, kept + mixed + scan + inner]
    backward = 3 * inner + 2 * mixed + TOKENS * 2320 * 2  # normed again, gradients of both norms' sides; all inputs
    of_scan = TOKENS * 32 + 2 * MIB // 4 + 4 * MIB + 2 * MIB + 8 * MIB + 3 * MIB // 4 + 4 * MIB + 7 * 4 * MIB
    assert others["whole"][2] == backward + of_scan + 1024 + 512 + 2048  # and the norm's weight


def test_the_fused_layer_of_mamba(others: dict[str, Any]) -> None:
    tokens, parts, states = 4 * MIB, TOKENS * 64 * 2, 4 * 512 * 32 * 4
    saved = parts + 2 * TOKENS * 16 * 2 + states
    assert others["inner"][:2] == [saved + 2 * tokens, saved + 4 * tokens]
    assert 0 < others["inner"][2] - 9 * tokens < 2 * MIB  # two inputs, delta, outputs, gradients, one in another order


@pytest.mark.parametrize("way", ["fused", "plain"])
def test_transformers_mamba_2_takes_the_fused_layer(tmp_path: Path, way: str) -> None:
    given = ("mamba_ssm", "causal_conv1d") if way == "fused" else ()
    answer = rehearse(tmp_path, "odd/mamba2.py", way, given=given)
    assert (answer.end, answer.fits) == (ScriptEnd.FINISHED, True), answer.traceback
    assert [one.partition(" ")[0] for one in answer.assumed] == ["mamba-ssm", "causal-conv1d"][: len(given)]
    untold = "the arithmetic of mamba-ssm is not counted: no time is told"
    assert (untold in answer.notes) is bool(given)


def test_norms(others: dict[str, Any]) -> None:
    assert others["LayerNorm"] == [8 * MIB + 2 * TOKENS * 4, 8 * MIB + 2 * TOKENS * 4, 8 * MIB + 2 * 2048]
    assert others["RMSNorm"] == [8 * MIB + TOKENS * 4, 8 * MIB + TOKENS * 4, 8 * MIB + 2048]
    assert others["engine"] == "cuda:0"


def test_what_was_assumed_is_named(attention: dict[str, Any], others: dict[str, Any]) -> None:
    assert attention["assumed"] == ["flash-attn", "flash-attn-3", "xformers"]
    assert others["assumed"] == ["apex", "causal-conv1d", "mamba-ssm", "transformer-engine"]


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is no extra: it would install triton")
def test_the_kernels_of_liger() -> None:
    liger = facts_of("stand_in_facts.py", "liger")
    hidden, tokens = 8192 * 1024 * 2, 8192
    assert liger["norm"] == [hidden + tokens * 4, hidden + tokens * 4, 108 * 1024 * 4 + 3 * 2048]  # 108 processors
    assert liger["swiglu"] == [tokens * 2816 * 2, tokens * 2816 * 2, 0]  # its gradients overwrite what it kept
    assert liger["rope"][:2] == 2 * [hidden + hidden // 4]
    gradients = hidden + 32000 * 1024 * 2
    chunk = 256 * 32000 * 2 + 393_216  # of logits; what is left of its segment is too small to be split off
    assert liger["loss"][:2] == [gradients + 512, gradients + chunk + tokens * 4 + tokens]
