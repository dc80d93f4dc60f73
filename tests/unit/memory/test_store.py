import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dryfit
from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.constants import DeviceConstants
from dryfit.gpu.events import SegmentKind, Shape
from dryfit.plans.estimate import Device, Lengths, SegmentSource, Work, compact, estimate, relevant, with_fragmentation
from dryfit.plans.timeline import end_bytes
from dryfit.plans.trace_store import FitPlan, TraceStore, fit, in_canonical_order, regime
from dryfit.plans.tracer import Variant
from dryfit.settings.errors import TraceError
from dryfit.settings.memory_terms import Confidence, DeviceSpec, OptimizerImpl
from dryfit.settings.version import code_fingerprint
from planning import MIB, ToyTracer

SHAPE = Shape(4, 64)
PLACE = ("toy", SegmentKind.MICRO_FIRST, Variant(), SHAPE)
DEVICE = Device(
    DeviceSpec(name="x", capacity_bytes=2**34),
    DeviceConstants(0, 0, Confidence.UNCALIBRATED),
    AllocatorSettings(),
    torch="2.13.0",
)
PLAN = FitPlan((8, 24), (512,), (Shape(16, 512),))


@pytest.fixture
def store(tmp_path):
    return TraceStore(tmp_path / "traces")


def trace(shape=SHAPE):
    return ToyTracer().trace(SegmentKind.MICRO_FIRST, Variant(), shape)


def only_file(store):
    (path,) = store.folder.iterdir()
    return path


def test_a_segment_comes_back_as_it_was(store):
    assert store.segment(*PLACE) is None
    store.put_segment(trace(), *PLACE)
    assert store.segment(*PLACE) == trace()


def test_each_place_is_its_own(store):
    store.put_segment(trace(), *PLACE)
    others = [
        ("other", SegmentKind.MICRO_FIRST, Variant(), SHAPE),
        ("toy", SegmentKind.MICRO_NEXT, Variant(), SHAPE),
        ("toy", SegmentKind.MICRO_FIRST, Variant(checkpointing=True), SHAPE),
        ("toy", SegmentKind.MICRO_FIRST, Variant(optimizer_impl=OptimizerImpl.PLAIN), SHAPE),
        ("toy", SegmentKind.MICRO_FIRST, Variant(offload_optimizer=True), SHAPE),
        ("toy", SegmentKind.MICRO_FIRST, Variant(), Shape(64, 4)),
        ("toy", SegmentKind.MICRO_FIRST, Variant(), None),
    ]
    assert [store.segment(*place) for place in others] == [None] * len(others)


def test_a_fit_comes_back_as_it_was(store):
    found = fit(PLAN, {shape: trace(shape) for shape in (*PLAN.nodes, *PLAN.checks)})
    store.put_fit(found, "toy", SegmentKind.MICRO_FIRST, Variant())
    of = regime(Shape(8, 512))
    back = store.fit("toy", SegmentKind.MICRO_FIRST, Variant(), of, 512)
    assert back.plan == PLAN
    assert back.at(Shape(9, 512)) == found.at(Shape(9, 512))
    assert store.fit("toy", SegmentKind.MICRO_FIRST, Variant(), of, None) is None


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "text", "folder"])
def test_a_damaged_file_is_as_good_as_none_and_is_written_anew(store, damage):
    store.put_segment(trace(), *PLACE)
    path = only_file(store)
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "flipped":
            path.write_bytes(data[:300] + bytes([data[300] ^ 255]) + data[301:])
        case "text":
            path.write_bytes(b"a segment")
        case "folder":
            path.unlink()
            path.mkdir()
    assert store.segment(*PLACE) is None
    store.put_segment(trace(), *PLACE)
    if damage != "folder":
        assert store.segment(*PLACE) == trace()


def rewrite(path, change):
    with np.load(path) as file:
        columns = {name: file[name] for name in file.files}
    header = json.loads(columns["header"].tobytes())
    change(header)
    columns["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    np.savez(path, **columns)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(format=99),
        lambda header: header.update(identity="another key with the same hash"),
        lambda header: header.pop("labels"),
        lambda header: header.update(labels=[["nowhere", "weights", "", ""]]),
        lambda header: header.update(names=["weight:a"]),
    ],
)
def test_a_foreign_header_is_as_good_as_none(store, change):
    store.put_segment(trace(), *PLACE)
    rewrite(only_file(store), change)
    assert store.segment(*PLACE) is None


def test_pickles_are_not_read(store):
    store.put_segment(trace(), *PLACE)
    np.savez(only_file(store), header=np.array([{"format": 1}], dtype=object))
    assert store.segment(*PLACE) is None


def test_the_files_used_longest_ago_are_dropped(tmp_path):
    folder = tmp_path / "traces"
    roomy = TraceStore(folder)
    places = [("toy", SegmentKind.MICRO_FIRST, Variant(), Shape(rows, 64)) for rows in range(2, 6)]
    for at, place in enumerate(places[:3]):
        before = set(folder.iterdir()) if folder.exists() else set()
        roomy.put_segment(trace(), *place)
        (path,) = set(folder.iterdir()) - before
        os.utime(path, (at, at))
    assert roomy.segment(*places[0]) is not None  # used just now
    size = sum(path.stat().st_size for path in folder.iterdir()) // 3
    TraceStore(folder, limit_bytes=int(2.5 * size)).put_segment(trace(), *places[3])
    assert [roomy.segment(*place) is not None for place in places] == [True, False, False, True]


def test_what_other_code_recorded_is_not_used(tmp_path):
    one, other = TraceStore(tmp_path, code="1"), TraceStore(tmp_path, code="2")
    one.put_segment(trace(), *PLACE)
    assert other.segment(*PLACE) is None
    other.put_segment(trace(), *PLACE)
    assert one.segment(*PLACE) == other.segment(*PLACE) == trace()


def test_code_is_known_by_its_names_and_content(tmp_path):
    def fingerprint(**files):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        return code_fingerprint(folder)

    assert fingerprint(a="1", b="2") == fingerprint(b="2", a="1")
    assert len({fingerprint(a="1"), fingerprint(a="2"), fingerprint(b="1"), fingerprint(a="1", b="")}) == 4
    mine = TraceStore.of_this_code(tmp_path)
    assert mine.code == TraceStore.of_this_code(tmp_path).code == code_fingerprint(Path(dryfit.__file__).parent)


def test_a_plan_is_found_by_its_question(store):
    source = SegmentSource(ToyTracer())
    plan = estimate(source, Work(Variant(), 8, 4, 16, Lengths(64)), DEVICE)
    assert store.plan("what fits?") is None
    store.put_plan(plan, "what fits?")
    assert store.plan("what fits?") == plan
    only_file(store).write_text('{"question": "what fits?"}')
    assert store.plan("what fits?") is None


def test_left_over_temporary_files_are_dropped_too(tmp_path):
    store = TraceStore(tmp_path, limit_bytes=20_000)
    torn = tmp_path / ".x.npz.1.tmp"
    torn.write_bytes(bytes(20_000))
    os.utime(torn, (1, 1))
    store.put_segment(trace(), *PLACE)
    assert not torn.exists()
    assert store.segment(*PLACE) is not None


def test_a_disk_that_takes_nothing_only_costs_the_cache(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    store = TraceStore(blocked)
    store.put_segment(trace(), *PLACE)
    assert store.segment(*PLACE) is None


WRITER = """
import sys
from pathlib import Path
from planning import ToyTracer
from dryfit.gpu.events import SegmentKind, Shape
from dryfit.plans.trace_store import TraceStore
from dryfit.plans.tracer import Variant
store, place = TraceStore(Path(sys.argv[1])), ("toy", SegmentKind.MICRO_FIRST, Variant(), Shape(4, 64))
for _ in range(200):
    store.put_segment(ToyTracer().trace(*place[1:]), *place)
"""


def test_readers_never_see_half_a_file(store):
    store.put_segment(trace(), *PLACE)
    path = os.pathsep.join(sys.path)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(store.folder)], env=os.environ | {"PYTHONPATH": path})
        for _ in range(2)
    ]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        assert store.segment(*PLACE) == trace()
        reads += 1
    assert reads > 10
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(list(store.folder.iterdir())) == 1


# ---- where segments come from

FIRST = SegmentKind.MICRO_FIRST
LADDER = [Shape(rows, 512) for rows in (128, 64, 32, 16, 8, 4, 1)]


def true(shape, variant=None):
    return in_canonical_order(ToyTracer().trace(FIRST, variant or Variant(), shape))


def test_one_shape_is_one_trace():
    tracer = ToyTracer()
    source = SegmentSource(tracer)
    for _ in range(2):
        assert in_canonical_order(source.segment(FIRST, Variant(), Shape(4, 64))) == true(Shape(4, 64))
    assert len(tracer.traced) == source.traced == 1


def test_a_prepared_ladder_is_interpolated():
    source = SegmentSource(ToyTracer())
    source.prepare(FIRST, LADDER)
    for shape in LADDER:
        assert in_canonical_order(source.segment(FIRST, Variant(), shape)) == true(shape)
    assert source.traced == 5  # two nodes, a check, and two where other kernels run


def test_a_prepared_grid_is_interpolated():
    source = SegmentSource(ToyTracer())
    shapes = [Shape(rows, length) for rows in (8, 16, 32, 64, 128) for length in range(64, 513, 64)]
    source.prepare(FIRST, shapes)
    for shape in shapes:
        assert in_canonical_order(source.segment(FIRST, Variant(), shape)) == true(shape)
    assert source.traced < len(shapes) // 2


def test_where_no_fit_holds_everything_is_traced():
    def bump(shape):
        return 512 * shape.rows**2

    source = SegmentSource(ToyTracer(bump=bump, activation=1))
    source.prepare(FIRST, LADDER)
    for shape in LADDER:
        found = in_canonical_order(source.segment(FIRST, Variant(), shape))
        assert found == in_canonical_order(ToyTracer(bump=bump, activation=1).trace(FIRST, Variant(), shape))
    assert source.traced == len(LADDER)


def test_where_operators_change_with_rows_everything_is_traced():
    source = SegmentSource(ToyTracer(extra_rows=32))
    source.prepare(FIRST, LADDER)
    for shape in LADDER:
        expected = in_canonical_order(ToyTracer(extra_rows=32).trace(FIRST, Variant(), shape))
        assert in_canonical_order(source.segment(FIRST, Variant(), shape)) == expected


@pytest.mark.parametrize(
    "shapes", [LADDER, [Shape(rows, length) for rows in (4, 8, 16) for length in (64, 128, 256, 512)]]
)
def test_a_later_process_traces_nothing(tmp_path, shapes):
    for traced in (True, False):
        source = SegmentSource(ToyTracer(), TraceStore(tmp_path))
        source.prepare(FIRST, shapes)
        for shape in shapes:
            assert in_canonical_order(source.segment(FIRST, Variant(), shape)) == true(shape)
        assert (source.traced > 0) is traced


def test_another_subject_has_traces_of_its_own(tmp_path):
    store = TraceStore(tmp_path)
    SegmentSource(ToyTracer(), store).segment(FIRST, Variant(), Shape(4, 64))
    other = SegmentSource(ToyTracer(key="other"), store)
    other.segment(FIRST, Variant(), Shape(4, 64))
    assert other.traced == 1


def test_a_loss_in_chunks_has_segments_of_its_own():
    whole, chunked = Variant(), Variant(chunked_loss=True, optimizer_impl=OptimizerImpl.PLAIN)
    own = {kind for kind in SegmentKind if relevant(kind, chunked).chunked_loss}
    assert own == {FIRST, SegmentKind.MICRO_NEXT, SegmentKind.MICRO_HOST, SegmentKind.EVALUATE}
    assert relevant(SegmentKind.MEASURE, chunked) == relevant(SegmentKind.MEASURE, whole)
    assert relevant(SegmentKind.UPDATE, chunked) == Variant(optimizer_impl=OptimizerImpl.PLAIN)


def test_what_a_kind_does_not_depend_on_is_not_traced_twice():
    source = SegmentSource(ToyTracer())
    plain, other = Variant(), Variant(checkpointing=True, offload_optimizer=True)
    for variant in (plain, other):
        for kind in SegmentKind:
            source.segment(kind, variant, Shape(4, 64) if kind.has_shape else None)
    # Checkpointing doubles the three kinds of micro-batches, the state's place the three of updates.
    assert source.traced == len(SegmentKind) + 6
    for kind in SegmentKind:
        source.segment(kind, Variant(optimizer_impl=OptimizerImpl.PLAIN), Shape(4, 64) if kind.has_shape else None)
    assert source.traced == len(SegmentKind) + 9


def test_another_optimizer_only_traces_updates():
    twin = SegmentSource(ToyTracer())
    source = SegmentSource(ToyTracer(states=1, key="one state"), twin=twin)
    for kind in SegmentKind:
        source.segment(kind, Variant(), Shape(4, 64) if kind.has_shape else None)
    assert (source.traced, twin.traced) == (3, len(SegmentKind) - 3)
    first = source.segment(SegmentKind.UPDATE_FIRST, Variant())
    assert end_bytes(first, "optimizer:") == 8 * MIB


def test_segments_are_kept_small():
    tables = {}
    segments = [ToyTracer().trace(FIRST, Variant(), Shape(rows, 64)) for rows in (2, 4)]
    small = [compact(segment, tables) for segment in segments]
    assert small[0].label_table is small[1].label_table
    assert [in_canonical_order(one) for one in small] == [in_canonical_order(one) for one in segments]
    assert small[0].deltas.itemsize == 8


def test_the_model_at_hand_is_traced():
    tracer = ToyTracer()
    source, variant = SegmentSource(tracer), Variant(checkpointing=True, offload_optimizer=True)
    for kind in SegmentKind:
        source.segment(kind, variant, Shape(4, 64) if kind.has_shape else None)
    assert {asked for _, asked, _ in tracer.traced} == {variant}


def test_a_plan_is_made_once(tmp_path):
    work = Work(Variant(), 8, 4, 16, Lengths.of(256, range(24, 200)))

    def planned(key, device=DEVICE):
        source = SegmentSource(ToyTracer(key=key), TraceStore(tmp_path))
        return with_fragmentation(estimate(source, work, device), source, work, device, seed=0), source.traced

    first, traced = planned("toy")
    assert traced > 0
    files = len(list(tmp_path.iterdir()))
    assert planned("toy") == (first, 0)
    assert len(list(tmp_path.iterdir())) == files
    planned("toy", replace(DEVICE, spec=DeviceSpec(name="y", capacity_bytes=2**35)))
    assert len(list(tmp_path.iterdir())) == files  # the device's size decides nothing here
    planned("toy", replace(DEVICE, allocator=AllocatorSettings(expandable_segments=True)))
    assert len(list(tmp_path.iterdir())) == files + 2


def test_what_cannot_be_traced_is_an_error_each_time():
    source = SegmentSource(ToyTracer(untraceable=lambda kind, variant: variant.checkpointing))
    for _ in range(2):
        with pytest.raises(TraceError, match="toy.py:7"):
            source.segment(FIRST, Variant(checkpointing=True), Shape(4, 64))
    assert source.segment(FIRST, Variant(), Shape(4, 64))
