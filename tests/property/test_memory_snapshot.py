"""Whatever was run, the simulation from its record agrees with it."""

import pickle
import sys
import tempfile
from pathlib import Path

from hypothesis import given, settings

from allocations import allocator_settings_texts, columns
from dryfit.memory.allocator.replay import replay
from snapshots import snapshot_of
from thinning import examples

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_memory_history import compare, read_snapshot


@settings(max_examples=examples(200))
@given(columns(), allocator_settings_texts())
def test_nothing_differs(events: tuple[list[int], list[int]], conf: str) -> None:
    content = snapshot_of(*events, conf)
    if not any(entry["action"].startswith(("alloc", "free")) for entry in content["device_traces"][0]):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pickle")
        path.write_bytes(pickle.dumps(content))
        trace = read_snapshot(path)
    assert compare(trace) == 0
    assert list(trace.deltas) == events[1]
    assert replay(trace.blocks, trace.deltas, trace.settings).peak_reserved_bytes == max(trace.reserved_bytes)
