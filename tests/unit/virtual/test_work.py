"""FLOPs, bytes and least time of a step, against torch's own counter, known formulas and hand-made sums."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # the name everybody knows
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import BertConfig, BertForSequenceClassification

from dryfit.gpu.offline_import import import_offline
from dryfit.gpu.private_apis.torch_modes import TorchDispatchMode
from dryfit.gpu.work import WorkCounter, flops_of
from dryfit.settings.devices import parse_device
from dryfit.settings.rehearsal_messages import StepWork
from parts import need_package

pytestmark = pytest.mark.heavy

AMOUNT = parse_device("24GiB")
CARD = parse_device("rtx4090")


class Counting(TorchDispatchMode):
    """Notes every operator of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = WorkCounter("cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.counter.note(func, args, kwargs or {}, out)
        return out


def work_of(step: Callable[[], Any], device: Any = AMOUNT) -> StepWork:
    with Counting() as mode:
        step()
    mode.counter.step_ends()
    work = mode.counter.work(device)
    assert work is not None
    return work


def torchs_flops(step: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def test_a_linear_layer_and_its_backward():
    layer, rows = nn.Linear(64, 48), torch.randn(10, 64)
    assert work_of(lambda: layer(rows)).flops_per_step == 2 * 10 * 64 * 48
    # The input needs no gradient: a product for the weight's alone.
    assert work_of(lambda: layer(rows).sum().backward()).flops_per_step == 2 * 2 * 10 * 64 * 48
    assert work_of(lambda: F.linear(rows, layer.weight)).bytes_per_step == 4 * (10 * 64 + 64 * 48 + 10 * 48)


def test_inference_mode_sees_products_whole():
    layer, rows = nn.Linear(64, 48), torch.randn(2, 10, 64)
    with torch.inference_mode():
        assert work_of(lambda: layer(rows) @ torch.ones(48, 3)).flops_per_step == 2 * 20 * 64 * 48 + 2 * 20 * 48 * 3


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(6, 8, 3, stride=2), nn.Conv2d(6, 12, 5, bias=False)],
)
def test_convolutions_as_torch_counts_them(layer: nn.Module):
    images = torch.randn(2, 6, 16, 16, requires_grad=True)

    def step() -> None:
        layer(images).sum().backward()

    assert work_of(step).flops_per_step == torchs_flops(step) > 0


def test_a_grouped_convolution_costs_as_its_groups_do_alone():
    images = torch.randn(2, 6, 16, 16, requires_grad=True)
    parts = [images[:, at : at + 1].detach().requires_grad_() for at in range(6)]
    whole, single = nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(1, 1, 3)
    alone = work_of(lambda: torch.stack([single(part).sum() for part in parts]).sum().backward())
    assert work_of(lambda: whole(images).sum().backward()).flops_per_step == alone.flops_per_step


def test_attention_of_every_kernel_has_a_formula():
    names = ("flash", "efficient", "cudnn")
    for name in names:
        assert getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention") in flop_registry
        assert getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward") in flop_registry


def test_causal_attention_counts_whole_and_takes_half_the_time():
    query = torch.empty(2, 4, 1024, 64, dtype=torch.float16)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    times = {}
    for causal in (False, True):
        counter = WorkCounter("cpu")
        counter.note(flash, (query, query, query, 0.0, causal), {}, (query, query[..., 0].float()))
        counter.step_ends()
        work = counter.work(CARD)
        assert work.flops_per_step == 2 * 2 * (2 * 4) * 1024 * 1024 * 64
        assert work.least_step_s is not None
        times[causal] = work.least_step_s
    assert times[False] == pytest.approx(2 * 2 * 8 * 1024 * 1024 * 64 / 165.2e12)
    assert times[True] == pytest.approx(times[False] * 1025 / 2048, rel=1e-6)


def test_products_by_group_count_each_row_once():
    rows, experts = torch.randn(32, 16, dtype=torch.bfloat16), torch.randn(4, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    product = torch.ops.aten._grouped_mm.default
    for left, right, out in (
        (rows, experts, torch.empty(32, 8)),
        (rows.t(), torch.empty(32, 8), torch.empty(4, 16, 8)),
    ):
        counter = WorkCounter("cpu")
        counter.note(product, (left, right, ends), {}, out)
        counter.step_ends()
        work = counter.work(AMOUNT)
        assert work.flops_per_step == 2 * 32 * 16 * 8


def bert() -> tuple[BertForSequenceClassification, dict[str, torch.Tensor]]:
    sizes: dict[str, Any] = {"attn_implementation": "eager"}
    config = BertConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        hidden_dropout_prob=0.0,
        **sizes,
    )
    inputs = {"input_ids": torch.randint(0, 50, (4, 16)), "labels": torch.zeros(4, dtype=torch.long)}
    return BertForSequenceClassification(config), inputs


def test_a_step_of_bert_as_torch_counts_it_and_as_six_times_parameters_and_tokens():
    model, inputs = bert()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()

    work = work_of(step)
    assert work.flops_per_step == torchs_flops(step)
    matrices = sum(p.numel() for name, p in model.bert.encoder.named_parameters() if p.dim() == 2)
    scores = 2 * 6 * 2 * 4 * 16 * 16 * 64  # layers, passes and factor 2, two products of tokens x tokens x width
    pooled = 6 * 4 * 64 * 64 + 6 * 4 * 64 * 2  # pooler and head see one token of each row
    assert work.flops_per_step == 6 * matrices * 4 * 16 + scores + pooled
    assert work.least_step_s is None
    assert "24GiB" in work.rates


def test_the_least_time_is_the_longer_of_arithmetic_and_traffic_by_operator():
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    product_s = 2 * 2048**3 / 82.6e12
    sum_s = 3 * 4 * 2048**2 / 1008e9
    work = work_of(lambda: (left @ right, left + right), CARD)
    assert work.least_step_s == pytest.approx(product_s + sum_s)
    assert "82.6 TFLOP/s in fp32" in work.rates
    assert "1008 GB/s" in work.rates


def test_a_script_that_allows_tf32_has_its_rate():
    ampere, rows = parse_device("a100-80"), torch.randn(1024, 1024)
    plain = work_of(lambda: rows @ rows, ampere)
    torch.set_float32_matmul_precision("high")
    try:
        allowed = work_of(lambda: rows @ rows, ampere)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert plain.least_step_s == pytest.approx(2 * 1024**3 / 19.5e12)
    assert allowed.least_step_s == pytest.approx(2 * 1024**3 / 156e12)
    assert "tf32" in allowed.rates


def test_views_cost_nothing_and_gathers_what_they_give():
    table, ids = torch.randn(1000, 64), torch.tensor([1, 2, 3])
    assert work_of(lambda: table.t()[:, 1:].unsqueeze(0).expand(7, -1, -1).detach()).bytes_per_step == 0
    assert work_of(lambda: F.embedding(ids, table)).bytes_per_step == 3 * 8 + 2 * 3 * 64 * 4
    assert work_of(lambda: torch.zeros(64).expand(1000, 64) + table).bytes_per_step == 64 * 4 * 2 + 2 * 1000 * 64 * 4
    assert work_of(lambda: table.copy_(torch.ones(1000, 64))).bytes_per_step == 3 * 1000 * 64 * 4
    assert work_of(lambda: table.mul_(2.0)).bytes_per_step == 2 * 1000 * 64 * 4


def test_a_fused_optimizer_reads_four_and_writes_three():
    weight = nn.Parameter(torch.randn(256, 256))
    weight.grad = torch.randn(256, 256)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    with Counting() as mode:
        optimizer.step()
    mode.counter.step_ends()
    work = mode.counter.work(AMOUNT)
    assert work.bytes_per_step == pytest.approx(7 * 4 * 256 * 256, abs=64)


def test_a_step_is_what_was_counted_since_the_last_end():
    counter, rows = WorkCounter("cpu"), torch.randn(4, 4)
    product = torch.ops.aten.mm.default
    assert counter.work(AMOUNT) is None
    counter.note(product, (rows, rows), {}, rows)
    counter.note(product, (rows, rows), {}, rows)
    counter.step_ends()
    counter.note(product, (rows, rows), {}, rows)
    first = counter.work(AMOUNT)
    counter.step_ends()
    second = counter.work(AMOUNT)
    assert (first.flops_per_step, second.flops_per_step) == (2 * 2 * 64, 2 * 64)


def test_products_of_bitsandbytes_have_formulas():
    need_package("bitsandbytes")
    import_offline("bitsandbytes")  # which registers its operators
    inputs, out = torch.empty(2, 10, 64, dtype=torch.bfloat16), torch.empty(2, 10, 48, dtype=torch.bfloat16)
    packed, scales = torch.empty(48 * 64 // 2, 1, dtype=torch.uint8), torch.empty(48)
    operators = torch.ops.bitsandbytes
    calls = (
        (operators.gemm_4bit.default, (inputs, packed, [48, 64], scales, 64, "nf4"), out),
        (operators.int8_linear_matmul.default, (inputs.to(torch.int8), torch.empty(48, 64, dtype=torch.int8)), out),
        (operators.dequantize_4bit.default, (packed, scales, 64, "nf4", [48, 64], torch.bfloat16), out[0].t()),
    )
    flops = []
    for func, args, result in calls:
        counter = WorkCounter("cpu")
        counter.note(func, args, {}, result)
        counter.step_ends()
        work = counter.work(AMOUNT)
        flops.append(work.flops_per_step)
    assert flops == [2 * 20 * 64 * 48, 2 * 20 * 64 * 48, 0]


def test_a_product_that_names_the_type_of_its_output_is_counted() -> None:
    bias, left, right = torch.empty(3), torch.empty(20, 48), torch.empty(48, 3)
    product = torch.ops.aten.addmm.dtype
    assert flops_of(product, (bias, left, right, torch.float32), {}, torch.empty(20, 3)) == 2 * 20 * 48 * 3
