"""Whatever was run and however late its record begins, the simulation from the record agrees with it."""

import pickle
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from allocations import allocator_settings_texts, columns
from dryfit.memory.allocator.replay import replay
from dryfit.memory.allocator.settings import AllocatorSettings
from dryfit.memory.allocator.snapshot import compare, read_snapshot
from snapshots import snapshot_of
from thinning import examples


@settings(max_examples=examples(200))
@given(columns(), allocator_settings_texts(), st.one_of(st.none(), st.integers(1, 120)))
def test_nothing_differs(events: tuple[list[int], list[int]], conf: str, keep: int | None) -> None:
    content = snapshot_of(*events, conf, keep=keep)
    if not any(entry["action"].startswith(("alloc", "free")) for entry in content["device_traces"][0]):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pickle")
        path.write_bytes(pickle.dumps(content))
        trace = read_snapshot(path)
    comparison = compare(trace, AllocatorSettings.parse(conf))
    assert comparison.first_difference is None
    assert comparison.active_difference_bytes == 0
    if keep is None:
        assert list(trace.deltas) == events[1]
        outcome = replay(trace.blocks, trace.deltas, trace.settings)
        assert outcome.final_allocated_bytes == trace.final_active_bytes
        assert outcome.peak_reserved_bytes == max(trace.reserved_bytes, default=0)
