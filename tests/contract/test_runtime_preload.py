"""The real libraries in the fork server: children compute with several threads and do not hang."""

import statistics
import sys

import pytest

from dryfit.settings.study_file import Isolation
from dryfit.settings.training_messages import TrainResult
from dryfit.settings.wire import Started
from runtime_jobs import Harness


@pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server")
def test_a_forked_child_of_preloaded_libraries_computes_with_two_threads(tmp_path):
    preload = ("torch", "transformers.trainer", "transformers.models.auto.modeling_auto", "runtime_jobs")
    with Harness(tmp_path, isolation=Isolation.FORKSERVER, preload=preload) as harness:
        for number in range(3):
            harness.start(f"torch{number}", "torch")
            event = harness.until_exit(f"torch{number}")
            assert event.result is not None and isinstance(event.result.answer, TrainResult), event.evidence.log_tail
            assert event.result.answer.value == 3 * 2 * 600.0 * 600 * 600
        overheads_ms: list[float] = []
        for number in range(30):
            harness.start(f"noop{number}", "noop")
            harness.until_exit(f"noop{number}")
        for event in harness.events:
            message = getattr(event, "message", None)
            if isinstance(message, Started) and event.key.startswith("noop"):
                overheads_ms.append(message.overhead_ms)
    assert len(overheads_ms) == 30
    print(f"overhead of a no-op child: median {statistics.median(overheads_ms):.1f} ms, max {max(overheads_ms):.1f} ms")
