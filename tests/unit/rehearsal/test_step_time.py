"""The formulas of step times against values worked out by hand, and what no estimate may do."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from math import exp, prod, sqrt
from pathlib import Path

import pytest
import torch

from dryfit.gpu.kinds import Kind, kind_of, sizes_of
from dryfit.gpu.step_time import Operation, Timing, fitted_reach, step_time
from dryfit.gpu.work import WorkCounter, flops_of, timed_flops
from dryfit.settings.device_reach import ReachLevel, device_link, device_reach
from dryfit.settings.devices import ProductPrecision, device_names, device_rates, parse_device
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_terms import StepPhase
from dryfit.settings.reach_calibrations import (
    REACH_FILE,
    ReachCalibration,
    calibrated_reach,
    keep_reach,
    read_reach_calibrations,
)
from dryfit.settings.version import PACKAGE_FOLDER
from dryfit.study.step_calibrations import _given

BF16, FP32 = ProductPrecision.BF16, ProductPrecision.FP32
FORWARD, BACKWARD, OPTIMIZER = StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER
aten = torch.ops.aten


def timing(name: str) -> Timing:
    device = parse_device(name)
    rates, reach = device_rates(device), device_reach(name)
    assert rates is not None and reach is not None
    return Timing(rates, reach, device.capability)


def matmul(*sizes: int, precision: ProductPrecision = BF16, size: int = 2) -> Operation:
    batch, rows, columns, terms = sizes
    flops = 2 * batch * rows * columns * terms
    moved = size * batch * (rows * terms + terms * columns + rows * columns)
    return Operation(Kind.MATMUL, FORWARD, flops, moved, precision, (*sizes, 0), size)


def memory(kind: Kind, moved: int, phase: StepPhase = FORWARD) -> Operation:
    return Operation(kind, phase, 0, moved, FP32)


def test_a_product_by_hand() -> None:
    # A100: 108 processors, 0.82 of 312 TFLOP/s. 4096 x 4096 x 4096 in tiles of 128 x 64: 2048 tiles, 19 waves of
    # 2 * 128 * 64 * (4096 + 128) operations at 0.957 * 0.82 * 312e12 / 108 a second; traffic 3 * 2 * 4096 ** 2 bytes.
    # The largest tiles, 256 x 128, need 5 waves of four times the work: more, though they lose nothing.
    waves_s = 19 * 2 * 128 * 64 * (4096 + 128) / (0.957 * 0.82 * 312e12 / 108)
    moved_s = 3 * 2 * 4096**2 / (0.90 * 2039e9)
    by_hand = 3.1e-6 + (waves_s**4 + moved_s**4) ** 0.25
    assert timing("a100-80").seconds(matmul(1, 4096, 4096, 4096)) == pytest.approx(by_hand, rel=1e-12)


def test_a_long_sum_over_few_tiles_is_split() -> None:
    one = timing("a100-80")
    narrow = one.seconds(matmul(1, 128, 128, 1 << 20))
    assert narrow < 0.1 * (2 * 128 * 128 * (1 << 20)) / (0.82 * 312e12 / 108)  # on one processor alone


def test_memory_by_hand() -> None:
    one = timing("h100-80")
    assert one.seconds(memory(Kind.ELEMENTWISE, 10**9)) == pytest.approx(3.1e-6 + 1e9 / (0.90 * 3352e9 * 0.98))
    assert one.seconds(memory(Kind.EMBEDDING_BACKWARD, 10**9)) == pytest.approx(3.1e-6 + 1e9 / (0.90 * 3352e9 * 0.16))
    small = 10 * 2**20  # less than half of 50 MiB
    assert one.seconds(memory(Kind.ELEMENTWISE, small)) == pytest.approx(3.1e-6 + small / (0.90 * 3352e9 * 0.98 * 1.8))
    assert one.seconds(memory(Kind.VIEW, 0)) == 0


def test_attention_by_hand() -> None:
    # 16 heads and rows of 2048 queries and keys, 128 wide: 256 blocks of queries on 132 processors are two waves.
    flops = 4 * 16 * 2048 * 2048 * 128
    call = Operation(Kind.ATTENTION, FORWARD, flops, 0, BF16, (16, 2048, 2048, 128), 2)
    waves = 16 * 16 / 132
    by_hand = 3.1e-6 + flops * (2 / waves) / (989.4e12 * 0.62 / (1 + 500 / 2048))
    one = timing("h100-80")
    assert one.seconds(call) == pytest.approx(by_hand)
    assert one.seconds(replace(call, is_backward=True)) == pytest.approx((by_hand - 3.1e-6) * 0.62 / 0.42 + 3.1e-6)
    narrow = replace(call, sizes=(16, 2048, 2048, 64))
    assert one.seconds(narrow) == pytest.approx((by_hand - 3.1e-6) / 0.85 + 3.1e-6)


@pytest.mark.parametrize("name", device_names())
def test_more_work_never_takes_less_time(name: str) -> None:
    one = timing(name)
    sizes = [(1, 512 * n, 1024, 1024) for n in range(1, 9)]
    for precision in (FP32, BF16):
        times = [one.seconds(matmul(*each, precision=precision)) for each in sizes]
        assert times == sorted(times)
    for kind in Kind:
        if kind not in (Kind.MATMUL, Kind.ATTENTION, Kind.CONVOLUTION, Kind.COLLECTIVE):
            times = [one.seconds(memory(kind, moved)) for moved in (0, 10**7, 10**9, 10**10)]
            assert times == sorted(times)


def estimated(name: str, step: list[tuple[Operation, int]], least_s: float = 0.0):
    return step_time(step, timing(name), least_s)


def test_host_and_device_work_side_by_side() -> None:
    busy = [(memory(Kind.ELEMENTWISE, 10**10), 10), (memory(Kind.ELEMENTWISE, 10**10, BACKWARD), 10)]
    alone = sum(timing("a100-80").seconds(one) * times for one, times in busy)
    told = estimated("a100-80", busy)
    assert (
        told.estimate_s == pytest.approx(alone)
        and told.busy_share == pytest.approx(1)
        and told.launch_bound_high_s is None
    )
    idle = [(memory(Kind.ELEMENTWISE, 8), 1000), (memory(Kind.VIEW, 0), 1000)]
    told = estimated("a100-80", idle)
    assert told.estimate_s == pytest.approx(1000 * (10e-6 + 1.5e-6))
    assert told.busy_share == pytest.approx(3.1 / 11.5, rel=0.01)
    assert told.launch_bound_high_s == pytest.approx(5 * 1000 * 11.5e-6) and told.high_s >= told.launch_bound_high_s
    # The host runs ahead in a long forward pass; its short operators behind it cost no time of their own.
    both = [(memory(Kind.ELEMENTWISE, 10**11), 1), (memory(Kind.ELEMENTWISE, 8, OPTIMIZER), 100)]
    told = estimated("a100-80", both)
    spent = [timing("a100-80").seconds(one) * times for one, times in both]
    assert told.estimate_s == pytest.approx(sum(spent))


def test_the_interval_is_as_wide_as_it_is_unsure() -> None:
    step = [(matmul(1, 8192, 8192, 8192), 10)]
    told = estimated("a100-80", step)
    spread = exp(1.28 * sqrt(0.08**2 + 0.08**2))
    assert told.high_s / told.estimate_s == pytest.approx(spread) and told.estimate_s / told.low_s == pytest.approx(
        spread
    )
    assert told.level == "measured" and told.by_kind == {"matmul": 1.0}
    guessed = estimated("rtx4090", step)
    assert guessed.level == "guessed" and guessed.high_s / guessed.estimate_s > spread
    gathers = estimated("a100-80", [(memory(Kind.GATHER, 10**10), 10)])
    assert gathers.high_s / gathers.estimate_s > spread
    assert estimated("a100-80", step, least_s=1.0).low_s == 1.0


def test_what_nobody_can_guess_has_no_time() -> None:
    assert estimated("t4", [(matmul(1, 512, 512, 512, precision=ProductPrecision.FP16), 1)]) is None
    assert estimated("t4", [(matmul(1, 512, 512, 512, precision=FP32), 1)]) is not None
    assert estimated("l4", [(matmul(1, 512, 512, 512), 1)]) is None
    assert device_reach("24GiB") is None
    assert estimated("a100-80", []) is None


def test_every_known_device_has_a_reach() -> None:
    for name in device_names():
        reach = device_reach(name)
        assert reach is not None and reach.processors > 0 and 0 < reach.simt <= 1 and 0 < reach.bandwidth <= 1
        assert (reach.level is ReachLevel.GUESSED) == reach.basis.startswith("nobody")


def named(func, *args):
    arguments = func._schema.arguments
    return {argument.name: value for argument, value in zip(arguments, args, strict=False)}


@pytest.mark.parametrize(
    ("func", "args", "flops", "kind", "sizes"),
    [
        (aten.mm.default, ((6, 4), (4, 5)), 1, Kind.MATMUL, (1, 6, 5, 4, 0)),
        (aten.bmm.default, ((3, 6, 4), (3, 4, 5)), 1, Kind.MATMUL, (3, 6, 5, 4, 0)),
        (aten.addmm.default, ((5,), (6, 4), (4, 5)), 1, Kind.MATMUL, (1, 6, 5, 4, 0)),
        (aten.add.Tensor, ((6, 4), (6, 4)), 0, Kind.ELEMENTWISE, ()),
        (aten.add.Tensor, ((6, 4), (4,)), 0, Kind.STRIDED, ()),
        (aten.sum.default, ((6, 4),), 0, Kind.REDUCE, ()),
        (aten._softmax.default, ((6, 4), -1, False), 0, Kind.SOFTMAX, ()),
        (aten.native_layer_norm.default, ((6, 4), (4,), None, None, 1e-5), 0, Kind.NORM, ()),
    ],
)
def test_operators_have_the_kind_of_their_kernel(func, args, flops, kind, sizes) -> None:
    shapes = isinstance(args[0], tuple)
    values = [torch.ones(one) if isinstance(one, tuple) and shapes else one for one in args]
    if func is aten.native_layer_norm.default:
        values[1] = [4]
    out = func(*values)
    about = named(func, *values)
    assert kind_of(func._schema.name, flops, about, out, FORWARD) is kind
    assert sizes_of(kind, func._schema.name, about, out, 2 * prod(sizes[:4])) == sizes


def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


FP8, STARTS = torch.float8_e4m3fn, shaped(5, dtype=torch.int32)
FLOAT = torch.float32


def convolved(transposed: bool, groups: int, mask: tuple[bool, bool, bool] | None = None):
    """A convolution's operator, or its gradients', with all that decides about its sizes."""
    inputs = shaped(2, 8, 10, 10)
    weight = shaped(8, 6 // groups, 3, 3) if transposed else shaped(6, 8 // groups, 3, 3)
    other = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)
    if mask is None:
        return aten.convolution.default, (inputs, weight, None, *other)
    side = 12 if transposed else 8
    return aten.convolution_backward.default, (shaped(2, 6, side, side), inputs, weight, [6], *other, mask)


@pytest.mark.parametrize(
    ("func", "args", "passes"),
    [
        (aten.mm.default, (shaped(6, 4), shaped(4, 5)), 1),
        (aten.baddbmm.default, (shaped(3, 6, 5), shaped(3, 6, 4), shaped(3, 4, 5)), 1),
        (aten.addmm.default, (shaped(5), shaped(6, 4), shaped(4, 5)), 1),
        (aten.linear.default, (shaped(2, 7, 4), shaped(5, 4)), 1),
        (
            aten._scaled_mm.default,
            (
                shaped(16, 32, dtype=FP8),
                shaped(48, 32, dtype=FP8).t(),
                *(shaped(16, 1, dtype=FLOAT), shaped(1, 48, dtype=FLOAT), None, None, torch.bfloat16),
            ),
            1,
        ),
        (aten._grouped_mm.default, (shaped(32, 16), shaped(4, 16, 24), shaped(4, dtype=torch.int32)), 1),
        (aten._grouped_mm.default, (shaped(16, 32), shaped(32, 24), shaped(4, dtype=torch.int32)), 1),
        (aten._grouped_mm.default, (shaped(4, 16, 32), shaped(32, 64), shaped(4, dtype=torch.int32)), 1),
        (*convolved(False, 1), 1),
        (*convolved(False, 2), 1),
        (*convolved(True, 1), 1),
        (*convolved(True, 2), 1),
        (*convolved(False, 2, (True, True, True)), 2),
        (*convolved(False, 1, (False, True, False)), 1),
        (*convolved(True, 2, (True, True, False)), 2),
    ],
)
def test_sizes_of_a_product_are_those_of_its_operations(func, args, passes) -> None:
    flops, out = flops_of(func, args, {}, func(*args)), func(*args)
    kind = kind_of(func._schema.name, flops, named(func, *args), out, FORWARD)
    sizes = sizes_of(kind, func._schema.name, named(func, *args), out, flops)
    assert flops > 0 and 2 * prod(sizes[:4]) * passes == flops


@pytest.mark.parametrize("rows", [None, STARTS])
@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_an_attention_kernel_of_its_own_has_its_heads_behind_the_rows(kernel, rows) -> None:
    # 4 rows of 64, 8 heads of 32: two products of 4 * 8 * 64 * 64 scores. One behind the other they are as many.
    shape = (4, 64) if rows is None else (256,) if kernel == "flash" else (1, 256)
    query = shaped(*shape, 8, 32)
    func = getattr(aten, f"_{kernel}_attention_forward").default
    given = {"query": query, "key": query, "value": query, "cum_seq_q" if kernel == "flash" else "cu_seqlens_q": rows}
    args = tuple(given.get(argument.name) for argument in func._schema.arguments)
    assert flops_of(func, args, {}, None) == 2 * 4 * 8 * 64 * 64 * (32 + 32)
    assert sizes_of(Kind.ATTENTION, func._schema.name, given, None, 0) == (32, 64, 64, 32)
    below = timed_flops(1000 * 64 * 64, func._schema.name, given | {"is_causal": True})
    assert below == 1000 * 64 * 65 // 2


def test_a_precision_that_nobody_measured_is_a_guess() -> None:
    half, single = ((matmul(1, 8192, 8192, 8192, precision=one), 1) for one in (BF16, FP32))
    assert estimated("b200", [half]).level == "measured" and estimated("b200", [single]).level == "guessed"
    assert estimated("v100-32", [single]).level == "measured"
    told = estimated("v100-32", [(replace(half[0], precision=ProductPrecision.FP16), 1)])
    assert told.level == "guessed" and "16 bits" in told.basis
    mostly = [(half[0], 10_000), single]
    assert estimated("b200", mostly).level == "measured"


def test_a_cast_and_a_step_of_an_optimizer() -> None:
    some = torch.ones(4, 4)
    cast = aten._to_copy.default(some, dtype=torch.bfloat16)
    assert kind_of("aten::_to_copy", 0, {"self": some}, cast, FORWARD) is Kind.CAST
    assert kind_of("aten::_to_copy", 0, {"self": some}, some.clone(), FORWARD) is Kind.COPY
    assert kind_of("aten::_foreach_add_", 0, {"self": [some]}, None, OPTIMIZER) is Kind.OPTIMIZER
    assert kind_of("aten::_foreach_add_", 0, {"self": [some]}, None, FORWARD) is Kind.ELEMENTWISE


def test_a_counter_knows_the_step_of_each_device() -> None:
    work = WorkCounter("cpu")
    left, right = torch.ones(64, 32), torch.ones(32, 16)
    for _ in range(3):
        work.note(aten.mm.default, (left, right), {}, left @ right, FORWARD)
    work.note(aten.t.default, (left,), {}, left.t(), FORWARD)
    work.step_ends()
    times = [work.work(parse_device(name)).step_time for name in ("a100-80", "h100-80")]
    assert all(one is not None and one.by_kind == {"matmul": 1.0} for one in times)
    assert work.work(parse_device("24GiB")).step_time is None
    assert isinstance(work.so_far(), Counter)
    work.ranks = 64  # more than a machine has
    assert work.work(parse_device("a100-80")).step_time is None


def test_collectives_run_beside_the_kernels_of_a_pass_alone() -> None:
    work = WorkCounter("cpu")
    work.ranks = 4
    left = torch.ones(1024, 1024)
    for phase in (FORWARD, BACKWARD):
        work.note(aten.mm.default, (left, left), {}, left @ left, phase)
    alone = work.so_far()
    work.step_ends()
    computing = work.work(parse_device("h100-80")).step_time
    assert computing.assumed == () and "collectives" not in computing.by_kind

    def with_sent(kind: str, size: int, phase: StepPhase):
        work.add(alone)
        work.sends(kind, size, phase)
        work.step_ends()
        return work.work(parse_device("h100-80")).step_time

    # Four H100: 9.4 us and 349 GB/s; an all-reduce moves 2 * 3 / 4 of its bytes, a gather of shards three of them.
    hidden = with_sent("all_reduce", 4, BACKWARD)  # shorter than the product of its pass
    shown = 9.4e-6 - timing("h100-80").seconds(matmul(1, 1024, 1024, 1024, precision=FP32, size=4))
    assert hidden.estimate_s - computing.estimate_s == pytest.approx(max(shown, 0), abs=1e-7)
    for kind, moved in (("all_reduce", 1.5), ("all_gather", 3), ("reduce_scatter", 3), ("broadcast", 0.75)):
        told = with_sent(kind, 10**9, OPTIMIZER)
        assert told.estimate_s - computing.estimate_s == pytest.approx(9.4e-6 + moved * 1e9 / 349e9, rel=1e-3), kind
        assert told.by_kind["collectives"] > 0.9 and told.high_s / told.low_s > computing.high_s / computing.low_s
        assert told.assumed == ("collectives of passes run beside their kernels",)


def test_links_of_a_card_that_nobody_measured_are_those_of_one_alike() -> None:
    assert device_link("h100-80", 3) == device_link("h100-80", 4)
    assert device_link("rtx4090", 2).bytes_per_s == device_link("l40s", 2).bytes_per_s
    assert not device_link("rtx4090", 2).is_measured and device_link("l40s", 2).is_measured
    assert device_link("b200", 8).bytes_per_s == 460e9 and device_link("h200", 16) is None


def test_compiled_passes_move_less_and_launch_less() -> None:
    step = [(memory(Kind.ELEMENTWISE, 10**9), 10), (memory(Kind.OPTIMIZER, 10**9, OPTIMIZER), 10)]
    device = parse_device("h100-80")
    eager = timing("h100-80")
    compiled = Timing(device_rates(device), device_reach("h100-80"), device.capability, is_compiled=True)
    assert compiled.seconds(step[0][0]) == pytest.approx(0.35 * (eager.seconds(step[0][0]) - 3.1e-6))
    assert compiled.seconds(step[1][0]) == eager.seconds(step[1][0])
    told = [step_time(step, one, 0.0) for one in (compiled, eager)]
    assert told[0].estimate_s < told[1].estimate_s and told[0].assumed and not told[1].assumed
    assert told[0].high_s / told[0].low_s > told[1].high_s / told[1].low_s


def test_copies_between_host_and_device_take_the_bus() -> None:
    host, device = torch.ones(64, 64), torch.empty(64, 64, device="meta")
    for name, named_ in (("aten::copy_", {"self": device, "src": host}), ("aten::_to_copy", {"self": host})):
        assert kind_of(name, 0, named_, device, FORWARD) is Kind.HOST_COPY
    assert kind_of("aten::copy_", 0, {"self": device, "src": device}, device, FORWARD) is Kind.COPY
    assert timing("h100-80").seconds(memory(Kind.HOST_COPY, 10**10)) == pytest.approx(1.0, rel=1e-3)
    assert kind_of("c10d::allreduce_", 0, {}, None, BACKWARD) is Kind.VIEW


# ---- A measured step sets one number of a device: found, kept, used; and refused where no number explains the step


DEVICE = parse_device("l40s")


def timing_of(reach):
    rates = device_rates(DEVICE)
    assert rates is not None
    return Timing(rates, reach, DEVICE.capability)


def fitted(step, measured_s, share=1.0, least_s=0.0):
    return fitted_reach(step, timing_of, device_reach("l40s"), least_s, measured_s, share)


@pytest.mark.parametrize(
    ("one", "quantity"),
    [
        (matmul(1, 8192, 8192, 8192, precision=BF16), "tensor"),
        (matmul(1, 8192, 8192, 8192, precision=FP32, size=4), "simt"),
        (memory(Kind.ELEMENTWISE, 10**10), "bandwidth"),
    ],
)
@pytest.mark.parametrize("value", [0.3, 0.9])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_number_is_found_again(one: Operation, quantity: str, value: float, share: float) -> None:
    step = [(one, 10), (memory(Kind.OPTIMIZER, 10**8, OPTIMIZER), 5)]
    told = step_time(step, timing_of(replace(device_reach("l40s"), **{quantity: value})), 0.0)
    measured_s = told.optimizer_s + (told.estimate_s - told.optimizer_s) * share
    found = fitted(step, measured_s, share)
    assert found.quantity == quantity and found.value == pytest.approx(value, rel=1e-6)
    assert found.before == getattr(device_reach("l40s"), quantity)


def test_a_card_without_a_number_gets_one() -> None:
    step = [(matmul(1, 8192, 8192, 8192, precision=ProductPrecision.FP16), 10)]
    t4 = parse_device("t4")
    rates = device_rates(t4)
    assert rates is not None and step_time(step, Timing(rates, device_reach("t4"), t4.capability), 0.0) is None
    found = fitted_reach(step, lambda one: Timing(rates, one, t4.capability), device_reach("t4"), 0.0, 1.0, 1.0)
    assert found.quantity == "tensor" and found.value is not None


def test_what_no_number_explains_is_refused() -> None:
    step = [(matmul(1, 8192, 8192, 8192), 10)]
    assert fitted(step, 1e-9).value is None and fitted(step, 1e9).value is None
    assert "whatever the device reaches" in fitted(step, 1e9).why
    small = [(memory(Kind.ELEMENTWISE, 8), 1000)]
    assert "the host decides" in fitted(small, 1e-2).why
    assert fitted([], 1.0).value is None


def made(**changes) -> ReachCalibration:
    first = ReachCalibration(
        device="l40s",
        quantity="tensor",
        value=0.7,
        measured_s=0.36,
        torch="2.13.0+cu130",
        watts=350,
        day="2026-11-20",
        command="train.py",
    )
    return first.model_copy(update=changes)


def test_calibrations_are_kept_by_device_torch_power_limit_and_number(tmp_path: Path) -> None:
    for one in (made(), made(value=0.8), made(watts=300), made(torch="2.12.1"), made(quantity="bandwidth", value=0.9)):
        keep_reach(tmp_path / "new", one)
    kept = read_reach_calibrations(tmp_path / "new")
    assert [(one.value, one.watts, one.torch[:4]) for one in kept] == [
        (0.8, 350, "2.13"),
        (0.7, 300, "2.13"),
        (0.7, 350, "2.12"),
        (0.9, 350, "2.13"),
    ]
    assert read_reach_calibrations(tmp_path) == ()
    (tmp_path / REACH_FILE).write_text("{}garbage")
    assert read_reach_calibrations(tmp_path) == ()


def test_the_newest_of_the_same_torch_is_used() -> None:
    found = calibrated_reach("l40s", "2.13.1", [made(), made(value=0.5, torch="2.12.0"), made(device="h200")])
    assert (found.tensor, found.level, found.calibrated) == (0.7, ReachLevel.CALIBRATED, {"tensor"})
    assert calibrated_reach("l40s", "2.9", [made()]).tensor == 0.7
    assert calibrated_reach("h200", "2.13", [made()]) == device_reach("h200")
    assert calibrated_reach("24GiB", "2.13", [made()]) is None


def test_only_steps_that_its_number_decides_are_surer() -> None:
    reach = calibrated_reach("l40s", "2.13", [made()])
    half, single = ([(matmul(1, 8192, 8192, 8192, precision=one), 10)] for one in (BF16, FP32))
    assert step_time(half, timing_of(reach), 0.0).level == "calibrated"
    assert step_time(single, timing_of(reach), 0.0).level == "guessed"
    spread = [
        told.high_s / told.estimate_s
        for told in (step_time(half, timing_of(one), 0.0) for one in (reach, device_reach("l40s")))
    ]
    assert spread[0] < spread[1]


def test_seconds_come_from_a_number_or_from_results(tmp_path: Path) -> None:
    assert _given("0.363") == 0.363
    results = tmp_path / "train_results.json"
    results.write_text(json.dumps({"train_steps_per_second": 4.0}))
    assert _given(str(results)) == 0.25
    results.write_text(json.dumps({"log_history": [{"loss": 1}, {"train_steps_per_second": 2.0}, {"eval": 1}]}))
    assert _given(str(results)) == 0.5
    for wrong in ('{"loss": 1}', "[]", "no json", '{"train_steps_per_second": 0}', '{"train_steps_per_second": "x"}'):
        results.write_text(wrong)
        with pytest.raises(ConfigError):
            _given(str(results))
    for wrong in ("0", "-1", "nan", "inf", str(tmp_path / "absent.json")):
        with pytest.raises(ConfigError):
            _given(wrong)


SCRIPT = """
import sys, torch
layers = [torch.nn.Linear(4, 4) for _ in range(2)]
optimizers = [torch.optim.SGD(layer.parameters()) for layer in layers]
for _ in range(int(sys.argv[1])):
    for layer, optimizer in zip(layers, optimizers):
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
print("the end")
raise SystemExit(3)
"""


def test_a_real_run_is_ended_after_its_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "work.py").write_text("")  # a name that this package has too
    file = PACKAGE_FOLDER / "gpu" / "timed_run.py"
    told = {}
    for steps in ("1000", "5"):
        run = [sys.executable, str(file), str(tmp_path / "answer.json"), "8", "train.py", steps]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told[steps] = json.loads((tmp_path / "answer.json").read_text()) | {"printed": done.stdout}
    assert told["1000"]["steps"] == 9 and told["1000"]["step_s"] > 0 and not told["1000"]["printed"]
    assert told["5"]["steps"] == 5 and told["5"]["error"] == "exit status 3" and told["5"]["device"] == ""
