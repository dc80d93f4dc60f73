"""How trials run fastest, chosen from steps that were measured: pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import instant
import ledgers
from dryfit.ledger.replay import StudyState
from dryfit.settings.choices import Precision
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.study.context import most_on_node
from dryfit.study.pace import (
    MeasuredWay,
    Way,
    divisions,
    faster_format,
    has_bf16,
    in_words,
    quickest,
    recorded_precision,
    with_precision,
)


def way(threads: int, together: int, step_s: float, precision: Precision = Precision.FP32) -> MeasuredWay:
    return MeasuredWay(way=Way(threads=threads, side_by_side=together, precision=precision), step_s=step_s)


@pytest.mark.parametrize(
    ("cores", "workers", "most", "expected"),
    [
        (1, 0, 100, [(1, 1)]),
        (2, 0, 100, [(2, 1), (1, 2)]),
        (2, 0, 1, [(2, 1)]),
        (2, 1, 100, [(1, 1)]),
        (2, 2, 100, []),
        (8, 0, 100, [(8, 1), (4, 2), (2, 4), (1, 8)]),
        (8, 1, 100, [(7, 1), (3, 2), (1, 4)]),
        (12, 0, 100, [(12, 1), (6, 2), (3, 4), (2, 6)]),
        (64, 0, 5, [(64, 1), (32, 2), (16, 4), (12, 5)]),
    ],
)
def test_ways_to_divide_cores(cores: int, workers: int, most: int, expected: list[tuple[int, int]]) -> None:
    assert divisions(cores, workers, most) == expected


@given(cores=st.integers(1, 256), workers=st.integers(0, 4), most=st.integers(1, 20))
def test_the_number_side_by_side_follows_from_the_threads(cores: int, workers: int, most: int) -> None:
    nodes = instant.one_node(cores)
    for threads, together in divisions(cores, workers, most):
        execution = {"threads": threads, "loader_workers": workers}
        config = instant.config(execution=execution, runtime={"parallel": "auto"})
        assert most_on_node(config, DeviceKind.CPU, nodes, next(iter(nodes))) == together <= min(most, 8)
        assert together * (threads + workers) <= cores


def test_the_way_by_which_trials_end_first() -> None:
    alone, both, four = way(4, 1, 1.0), way(2, 2, 1.5), way(1, 4, 2.6)
    assert quickest([alone, both, four], 24) is four, "24 steps: 24.0, 18.0 and 15.6 s"
    assert quickest([alone, both, four], 2) is both, "a third and fourth trial at once would have nothing to do"
    assert quickest([alone, both, four], 1) is alone
    assert quickest([alone, both], 3) is alone, "3.0 s each: the search knows more with one at a time"
    assert quickest([alone, way(2, 2, 1.91)], 24) is alone, "within 5 %"
    assert quickest([alone, way(2, 2, 1.89)], 24) is not alone


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(1e-3, 1e3)), min_size=1, max_size=5), st.integers(1, 1000))
def test_nothing_measured_ends_much_sooner(steps: list[tuple[int, float]], trials: int) -> None:
    measured = [way(1, together, step_s) for together, step_s in steps]
    chosen = quickest(measured, trials)
    assert all(chosen.finish_s(trials) <= one.finish_s(trials) * 1.0501 for one in measured)


def test_bf16_where_it_was_clearly_faster() -> None:
    fp32 = way(1, 2, 1.0)
    assert faster_format(fp32, None) is fp32
    assert faster_format(fp32, way(1, 2, 0.95, Precision.BF16)) is fp32
    assert faster_format(fp32, way(1, 2, 7.0, Precision.BF16)) is fp32, "without instructions it is emulated"
    assert faster_format(fp32, bf16 := way(1, 2, 0.6, Precision.BF16)) is bf16


def test_which_device_has_bf16() -> None:
    def gpu(capability: tuple[int, int]) -> DeviceSpec:
        return DeviceSpec(name="a GPU", capacity_bytes=2**30, capability=capability)

    assert not has_bf16(DeviceKind.CUDA, None, cpu=True) and not has_bf16(DeviceKind.CUDA, gpu((7, 5)), cpu=True)
    assert has_bf16(DeviceKind.CUDA, gpu((8, 0)), cpu=False) and has_bf16(DeviceKind.CUDA, gpu((9, 0)), cpu=False)
    assert has_bf16(DeviceKind.CPU, None, cpu=True) and not has_bf16(DeviceKind.CPU, gpu((8, 0)), cpu=False)


def test_the_format_is_that_of_the_ledger() -> None:
    assert recorded_precision(StudyState()) is None
    script = ledgers.begun()
    assert recorded_precision(script.state()) is None, "an older ledger does not say"
    auto = instant.config(train={"precision": "auto"})
    assert with_precision(auto, None) is auto
    assert with_precision(auto, Precision.BF16).train.precision is Precision.BF16
    named = instant.config(train={"precision": "fp16"})
    assert with_precision(named, Precision.BF16) is named


def test_what_was_chosen_in_words() -> None:
    both = way(1, 2, 0.5)
    text = in_words(both.way, Precision.BF16, [way(2, 1, 1.0), both])
    assert text == (
        "2 trial(s) at once, 1 thread(s) each, bf16 "
        "(steps a second, threads x trials: 2 x 1 fp32: 1.00, 1 x 2 fp32: 4.00)"
    )
