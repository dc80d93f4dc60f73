"""Records of a device's allocator: how they are read, replayed, and held against a plan."""

import datetime
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from dryfit.core.errors import ConfigError, InternalError
from dryfit.core.jobs.memory import MemoryCategory, StepPhase
from dryfit.memory.allocator.settings import MIB, AllocatorSettings
from dryfit.memory.planning.timeline import compose
from dryfit.memory.tracing.events import Label, Segment
from snapshots import BASE, snapshot_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_memory_history import (
    SnapshotTrace,
    Taken,
    by_operator,
    compare,
    first_deviation,
    observed_allocations,
    phase_differences,
    planned_allocations,
    read_snapshot,
)

F, B = StepPhase.FORWARD, StepPhase.BACKWARD
LABELS = (
    Label(F, MemoryCategory.ACTIVATIONS, "encoder.layer.0", "aten.mm.default"),
    Label(B, MemoryCategory.TEMPORARIES, "encoder.layer.0", "aten.mm.default"),
)
SEGMENT = Segment(
    blocks=(0, 1, 0, 2, 1, 2),
    deltas=(30 * MIB, 12 * MIB, -30 * MIB, 11 * MIB + 1, -12 * MIB, -11 * MIB - 1),
    labels=(0, 0, 0, 1, 1, 1),
    label_table=LABELS,
    names={},
    gemm_at={},
)

# 30 and 12 are taken, 30 come back and serve 11 and 15 of the next three requests.
BLOCKS = (0, 1, 0, 2, 3, 4, 1, 5, 3)
DELTAS = tuple(int(size * MIB) for size in (30, 12, -30, 11, 15, 25, -12, 0.25, -15))


def _write(folder: Path, content: Any) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    return path


def test_events_are_those_that_were_run(tmp_path: Path) -> None:
    trace = read_snapshot(_write(tmp_path, snapshot_of(BLOCKS, DELTAS)))
    assert (tuple(trace.blocks), tuple(trace.deltas)) == (BLOCKS, DELTAS)
    assert [size / MIB for size in trace.reserved_bytes] == [30, 42, 42, 42, 42, 68, 68, 70, 70]
    assert trace.released == frozenset()
    assert trace.settings == AllocatorSettings()


def test_the_same_as_json(tmp_path: Path) -> None:
    content = snapshot_of(BLOCKS, DELTAS)
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert read_snapshot(path) == read_snapshot(_write(tmp_path, content))


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:4"])
def test_the_simulation_agrees(tmp_path: Path, conf: str) -> None:
    trace = read_snapshot(_write(tmp_path, snapshot_of(BLOCKS, DELTAS, conf)))
    assert compare(trace) == 0


@pytest.mark.parametrize("keep", [12, 7, 3])
def test_a_record_that_begins_late_is_refused(tmp_path: Path, keep: int) -> None:
    content = snapshot_of(BLOCKS, DELTAS)
    content["device_traces"][0] = content["device_traces"][0][-keep:]
    with pytest.raises(ConfigError) as caught:
        read_snapshot(_write(tmp_path, content))
    assert caught.value.allowed == "a record without gaps"
    assert "from the start" in caught.value.hint


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_memory_given_back_on_a_full_device_is_followed(tmp_path: Path, conf: str) -> None:
    blocks, deltas = (0, 1, 0, 2), tuple(size * MIB for size in (40, 20, -40, 60))
    trace = read_snapshot(_write(tmp_path, snapshot_of(blocks, deltas, conf, capacity=80 * MIB)))
    assert trace.released == frozenset({3})
    assert [size / MIB for size in trace.reserved_bytes] == [40, 60, 60, 80]
    assert compare(trace) == 0


def test_the_largest_difference_is_found(tmp_path: Path) -> None:
    trace = read_snapshot(_write(tmp_path, snapshot_of(BLOCKS, DELTAS)))
    # With this limit the 30 that are cached serve neither 11 nor 15, and 25 need no new segment.
    assert compare(replace(trace, settings=AllocatorSettings.parse("max_split_size_mb:20"))) == (12 + 16) * MIB


def test_segments_that_were_chosen_at_run_time_are_known(tmp_path: Path) -> None:
    content = snapshot_of(BLOCKS, DELTAS, "expandable_segments:True")
    content["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = ""
    trace = read_snapshot(_write(tmp_path, content))
    assert trace.settings.expandable_segments
    assert compare(trace) == 0


def test_what_a_thread_noted_comes_with_its_events(tmp_path: Path) -> None:
    content = snapshot_of(BLOCKS, DELTAS)
    for number, entry in enumerate(content["device_traces"][0]):
        entry["user_metadata"] = f"{number} {entry['action']}"
    noted = [note.split() for note in read_snapshot(_write(tmp_path, content)).notes]
    assert [what for _, what in noted] == ["alloc" if delta > 0 else "free_completed" for delta in DELTAS]
    assert [int(number) for number, _ in noted] == sorted({int(number) for number, _ in noted})


def test_a_record_as_torch_writes_it() -> None:
    """Its own reader of snapshots takes what these tests are made with."""
    content = snapshot_of(BLOCKS, DELTAS)
    assert "30.0MiB" in _memory_viz.trace(content)
    assert "70.0MiB" in _memory_viz.segsum(content)


def test_a_record_written_by_hand(tmp_path: Path) -> None:
    """A block of 11.5 takes a whole segment of 12, is freed, and 1 and 12 are taken; another stream is left out."""

    def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "stream": stream}

    large, small, other = BASE, BASE + 100 * MIB, BASE + 200 * MIB
    old = int(11.5 * MIB)
    content = {
        "device_traces": [
            [
                entry("segment_alloc", large, 12 * MIB),
                entry("alloc", large, old),
                entry("free_requested", large, old),
                entry("free_completed", large, old),
                entry("segment_alloc", other, 2 * MIB, stream=7),
                entry("alloc", other, 64, stream=7),
                {"action": "oom", "device_free": 5, "size": 99 * MIB, "stream": 0},
                entry("segment_alloc", small, 2 * MIB),
                entry("alloc", small, MIB),
                entry("alloc", large, 12 * MIB),
            ]
        ],
        "segments": [
            {
                "device": 0,
                "address": address,
                "total_size": sum(size for size, _, _ in blocks),
                "stream": stream,
                "blocks": [
                    {
                        "address": address + sum(b[0] for b in blocks[:at]),
                        "size": size,
                        "requested_size": asked,
                        "state": state,
                    }
                    for at, (size, asked, state) in enumerate(blocks)
                ],
            }
            for address, stream, blocks in (
                (large, 0, [(12 * MIB, 12 * MIB, "active_allocated")]),
                (small, 0, [(MIB, MIB, "active_allocated"), (MIB, 0, "inactive")]),
                (other, 7, [(512, 64, "active_allocated"), (2 * MIB - 512, 0, "inactive")]),
            )
        ],
    }
    trace = read_snapshot(_write(tmp_path, content))
    assert list(zip(trace.blocks, trace.deltas, strict=True)) == [(0, old), (0, -old), (1, MIB), (2, 12 * MIB)]
    assert [size / MIB for size in trace.reserved_bytes] == [12, 12, 14, 14]
    assert compare(trace) == 0


def test_a_pickle_that_asks_for_more_than_plain_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="asks for datetime.date"):
        read_snapshot(_write(tmp_path, {"segments": datetime.date(2026, 1, 1)}))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "no plain values"),
        (b"nothing that can be read", "no plain values"),
        (b'{"segments": [', "no plain values"),
        (b'{"segments": ' + b"[" * 10**5, "no plain values"),
        (pickle.dumps([1]), "a list"),
        (pickle.dumps({"segments": []}), "no trace of device 0"),
        (pickle.dumps({"device_traces": [[]]}), "nothing allocated or freed"),
        (pickle.dumps({"device_traces": [[1]]}), "'device_traces' is a list"),
        (pickle.dumps({"device_traces": [[{"action": "alloc"}]]}), "'stream' is missing"),
        (pickle.dumps({"device_traces": [[{"action": "alloc", "stream": 0, "pool_id": 3}]]}), "'pool_id' is a int: 3"),
        (pickle.dumps({"device_traces": [[{"action": "alloc", "stream": 0, "addr": -1}]]}), "'addr' is a int: -1"),
        (
            pickle.dumps(
                {"device_traces": [[{"action": what, "stream": 0, "addr": 1, "size": 1} for what in ("alloc", "x")]]}
            ),
            "the action 'x'",
        ),
    ],
)
def test_a_file_that_is_no_snapshot_is_a_config_error(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_snapshot(path)
    assert found in caught.value.found
    assert str(path) in caught.value.doing


def test_no_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_snapshot(tmp_path / "none")


@pytest.mark.parametrize(
    ("twice", "found"), [("segment_alloc", "its state is another"), ("alloc", "does not fit to what comes before it")]
)
def test_a_record_that_is_not_as_it_happened_is_refused(tmp_path: Path, twice: str, found: str) -> None:
    content = snapshot_of(BLOCKS, DELTAS)
    entries = content["device_traces"][0]
    last = max(at for at, entry in enumerate(entries) if entry["action"] == twice)
    doubled = entries[: last + 1] + entries[last:]
    with pytest.raises(ConfigError, match=found):
        read_snapshot(_write(tmp_path, {**content, "device_traces": [doubled]}))


def history(folder: Path, *, notes: tuple[str, ...] = ("forward", "forward", "")) -> SnapshotTrace:
    """What a device records that runs exactly the events of ``SEGMENT``; each allocation has its thread's note."""
    content = snapshot_of(SEGMENT.blocks, SEGMENT.deltas)
    left = list(notes)
    for entry in content["device_traces"][0]:
        entry["user_metadata"] = left.pop(0) if entry["action"] == "alloc" else "forward"
    path = folder / "history.pickle"
    path.write_bytes(pickle.dumps(content))
    return read_snapshot(path)


def test_a_trace_and_its_own_history_agree(tmp_path: Path) -> None:
    found = by_operator(compose([[SEGMENT]]), history(tmp_path))
    assert found["first_deviation"] is None
    assert [(one["phase"], one["matched"]) for one in found["phases"]] == [(F, 2), (B, 1)]
    assert not any(one["only_planned_bytes"] or one["only_observed_bytes"] for one in found["phases"])
    assert (found["replay_difference_bytes"], found["replayed_events"]) == (0, 6)


def test_sizes_are_those_of_whole_blocks(tmp_path: Path) -> None:
    planned = planned_allocations(compose([[SEGMENT]]))
    assert [one.size_bytes for one in planned] == [30 * MIB, 12 * MIB, 11 * MIB + 512]
    assert planned[2].by == "encoder.layer.0 aten.mm.default"
    observed = observed_allocations(history(tmp_path))
    assert [(one.phase, one.size_bytes) for one in observed] == [(one.phase, one.size_bytes) for one in planned]


def test_a_note_that_is_no_phase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="lunch"):
        observed_allocations(history(tmp_path, notes=("forward", "lunch", "")))


def test_what_only_one_side_has_is_told_phase_by_phase() -> None:
    planned = [Taken(F, 10 * MIB), Taken(F, 4 * MIB), Taken(B, 6 * MIB)]
    observed = [Taken(F, 4 * MIB), Taken(F, 10 * MIB), Taken(F, 10 * MIB), Taken(StepPhase.CLIP, 512)]
    forward, backward, clip = phase_differences(planned, observed)
    assert (forward.matched, forward.only_planned_bytes, forward.only_observed_bytes) == (2, 0, 10 * MIB)
    assert (backward.matched, backward.only_planned_bytes, backward.largest_planned_bytes) == (0, 6 * MIB, 6 * MIB)
    assert (clip.only_observed_bytes, clip.largest_observed_bytes) == (512, 512)


def test_the_first_deviation_is_named_and_single_numbers_are_passed_over() -> None:
    planned = [Taken(F, 4 * MIB), Taken(F, 512), Taken(B, 6 * MIB, "layer aten.mm")]
    assert first_deviation(planned, [Taken(F, 4 * MIB), Taken(B, 6 * MIB)]) is None
    found = first_deviation(planned, [Taken(F, 4 * MIB), Taken(B, 7 * MIB)])
    assert found is not None
    assert (found.index, found.phase, found.planned_by) == (1, B, "layer aten.mm")
    assert (found.planned_bytes, found.observed_bytes) == (6 * MIB, 7 * MIB)
    more = first_deviation(planned, [Taken(F, 4 * MIB)])
    assert more is not None and more.observed_bytes is None
    less = first_deviation([], planned)
    assert less is not None and (less.phase, less.planned_bytes) == (F, None)
