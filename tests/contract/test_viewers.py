"""The files for viewers say what the answer says, and torch's own tools read them."""

import base64
import json
import pickle
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.cuda import _memory_viz as viz

import dryfit
from dryfit.settings.errors import ConfigError
from memory_viz import HISTORY, IS_THERE, SEGMENTS, TIMELINE, views_of
from study_runs import command

pytestmark = pytest.mark.heavy

SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(64, SIZE, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OWN = """
import pickle, torch
torch.cuda.memory._record_memory_history(max_entries=5)
kept = torch.empty(1 << 20, device="cuda")
gone = torch.empty(1 << 22, device="cuda")
del gone
torch.cuda.memory._dump_snapshot("own.pickle")
with open("own.pickle", "rb") as file:
    own = pickle.load(file)
actions = [event["action"] for event in own["device_traces"][0]]
assert actions == ["segment_alloc", "alloc", "alloc", "free_requested", "free_completed"], actions
assert sum(one["total_size"] for one in torch.cuda.memory_snapshot()) == torch.cuda.memory_reserved() == 20 << 20
frames = [frame for event in own["device_traces"][0] for frame in event["frames"]]
lines = [frame["line"] for frame in frames if "train" in frame["filename"]]
assert list(dict.fromkeys(lines)) == [4, 5, 6], lines
torch.cuda.memory._record_memory_history(enabled=None)
assert torch.cuda.memory._snapshot()["device_traces"] == [[]]
optimizer = torch.optim.SGD([kept.requires_grad_()])
for _ in range(3):
    kept.sum().backward()
    optimizer.step()
"""


DUMPED = """
import base64, torch
torch.cuda.memory._record_memory_history()

def observe(device, asked, allocated, free):
    torch.cuda.memory._dump_snapshot("oom.pickle")
    with open("oom.pickle", "rb") as file:
        print("DUMPED", device, asked, allocated, free, base64.b64encode(file.read()).decode(), flush=True)

torch._C._cuda_attach_out_of_memory_observer(observe)
kept = [torch.empty(1 << 20, device="cuda") for _ in range(3)]
del kept[1]
try:
    torch.empty(1 << 30, device="cuda")
except torch.OutOfMemoryError:
    assert torch.cuda.memory_stats()["num_ooms"] == 1
kept[0].requires_grad_().sum().backward()
"""


def rehearsed(folder: Path, script: str, device: str = "rtx4090", **options):
    (folder / "train.py").write_text(script)
    files = {"snapshot": folder / "s.pickle", "trace": folder / "t.json"}
    answer = dryfit.rehearse(folder / "train.py", device=device, **files, **options)
    assert answer.memory is not None, answer.traceback
    return SimpleNamespace(
        answer=answer,
        memory=answer.memory,
        file=files["snapshot"].read_bytes(),
        snapshot=pickle.loads(files["snapshot"].read_bytes()),  # noqa: S301  # written by this test
        trace=json.loads(files["trace"].read_text())["traceEvents"],
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return rehearsed(tmp_path_factory.mktemp("plain"), SCRIPT.replace("SIZE", "1024"))


def running(events, plus, minus):
    total, most = 0, 0
    for event in events:
        total += event["size"] * ((event["action"] in plus) - (event["action"] in minus))
        most = max(most, total)
    return total, most


def test_the_snapshot_says_what_the_answer_says(plain):
    (events,) = plain.snapshot["device_traces"]
    segments = plain.snapshot["segments"]
    end, most = running(events, {"segment_alloc"}, {"segment_free"})
    assert most == plain.memory.peak_reserved_bytes and end == sum(one["total_size"] for one in segments)
    end, most = running(events, {"alloc"}, {"free_completed"})
    assert end == sum(block["requested_size"] for one in segments for block in one["blocks"])
    assert 0 <= plain.memory.peak_allocated_bytes - most < 512 * len(events)  # the blocks are rounded
    held = {event["addr"]: event["size"] for event in events if event["action"] == "alloc"}
    for one in segments:
        assert one["total_size"] == sum(block["size"] for block in one["blocks"])
        for block in one["blocks"]:
            if block["state"] == "active_allocated":
                assert held[block["address"]] == block["requested_size"]
    lines = {frame["line"] for event in events for frame in event["frames"] if frame["filename"].endswith("train.py")}
    assert lines == {5, 8, 9, 10}  # as the answer's lines


def test_torch_reads_the_snapshot(plain):
    for plot in (viz.segment_plot, viz.trace_plot):
        (data,) = re.findall(r'"base64": "([^"]*)"', plot(plain.snapshot))
        assert pickle.loads(base64.b64decode(data)) == plain.snapshot  # noqa: S301
    first, *others = plain.snapshot["segments"]
    lines = []
    viz.compare([first], [first, *others], format_flamegraph=lines.append)
    assert "only_after" in lines[0] and "only_before" not in lines[0] and "train.py:" in lines[0]
    assert "segments: " in viz.segsum(plain.snapshot)
    assert "alloc(" in viz.trace(plain.snapshot)


def sizes(texts):
    return sorted(int(size) for text in texts for size in re.findall(r"Size: [^(]*\((\d+) bytes", text))


def looked_at(file, folder):
    """What PyTorch's viewer says of a snapshot, held against it; and bytes allocated and reserved after each event."""
    views = views_of(file, folder)
    snapshot = pickle.loads(file)  # noqa: S301
    (events,) = snapshot["device_traces"]
    for view, action in ((TIMELINE, "alloc"), (SEGMENTS, "segment_alloc")):
        *texts, others = views[view]["texts"]
        assert sizes(texts) == sorted(event["size"] for event in events if event["action"] == action)
        assert all(re.search(r"train\.py:\d+:\w", text) for text in texts if "workspace:0:" not in text)
        assert others.startswith("Small tensors")  # the sum of what is too small to be drawn: here nothing
    history = views[HISTORY]
    assert len(history["texts"]) == sum(event["action"] != "free_completed" for event in events)
    held = [block for one in snapshot["segments"] for block in one["blocks"] if block["state"] == "active_allocated"]
    assert history["drawn"][-1] == [len(snapshot["segments"]), len(held), len(held)]
    assert len(history["blocks"]) == len(held)
    assert all("train.py:" in text for text in history["blocks"] if "workspace:0:" not in text)
    told = [re.findall(r"\((\d+) bytes\) (?:allocated|reserved)", text) for text in history["texts"]]
    states = [(int(allocated), int(reserved)) for allocated, reserved in told]
    requested = sum(block["requested_size"] for block in held)
    assert states[-1] == (requested, sum(one["total_size"] for one in snapshot["segments"]))
    return views, states


@IS_THERE
def test_pytorchs_viewer_draws_a_snapshot(plain, tmp_path):
    views, states = looked_at(plain.file, tmp_path)
    (events,) = plain.snapshot["device_traces"]
    assert max(allocated for allocated, _ in states) == running(events, {"alloc"}, {"free_completed"})[1]
    assert max(reserved for _, reserved in states) == plain.memory.peak_reserved_bytes
    if settings := views.get("Allocator Settings"):  # since torch 2.8
        assert json.loads(settings["texts"][0]) == plain.snapshot["allocator_settings"]


@IS_THERE
def test_pytorchs_viewer_draws_an_out_of_memory_error(tmp_path):
    seen = rehearsed(tmp_path, SCRIPT.replace("SIZE", "8192"), device="2GiB")
    views, _ = looked_at(seen.file, tmp_path)
    (error,) = seen.answer.out_of_memory
    last = views[HISTORY]["texts"][-1]
    assert f"OOM (requested 256.0MiB ({error.requested_bytes} bytes)" in last
    assert f"train.py:{error.line.rpartition(':')[2]}:{error.code}" in last


@IS_THERE
def test_pytorchs_viewer_draws_what_a_script_dumps_at_an_error(tmp_path):
    (tmp_path / "train.py").write_text(DUMPED)
    done = subprocess.run(
        command("rehearse", "--device", "2GiB", "train.py"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    (line,) = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if line.startswith("DUMPED")]
    device, asked, allocated, free, data = line.split()[1:]
    assert (device, asked, allocated) == ("0", str(4 << 30), str(8 << 20))
    views, states = looked_at(base64.b64decode(data), tmp_path)
    assert states[-1] == (8 << 20, 20 << 20)
    last = views[HISTORY]["texts"][-1]
    assert f"({free} bytes) memory free" in last and 'train.py:14:torch.empty(1 << 30, device="cuda")' in last


def test_the_trace_counts_what_the_answer_says(plain):
    counters = [event for event in plain.trace if event["ph"] == "C" and event["name"] == "memory"]
    assert max(event["args"]["allocated"] for event in counters) == plain.memory.peak_allocated_bytes
    assert max(sum(event["args"].values()) for event in counters) == plain.memory.peak_reserved_bytes
    peak = max(counters, key=lambda event: event["args"]["allocated"])
    by_category = {}
    for event in plain.trace:
        if event["ph"] == "C" and event["name"] != "memory" and event["ts"] <= peak["ts"]:
            by_category[event["name"]] = event["args"]["bytes"]
    told = {str(name): size for name, size in plain.memory.by_category.items()}
    assert {name: size for name, size in by_category.items() if size} == told
    slices = [event for event in plain.trace if event["ph"] == "X"]
    assert {"step 1", "step 2", "step 3", "forward", "backward", "optimizer", "0", "3"} <= {
        one["name"] for one in slices
    }
    for row in (1, 2, 3):
        ordered = sorted((one["ts"], one["dur"]) for one in slices if one["tid"] == row)
        assert all(a + b <= c for (a, b), (c, _) in pairwise(ordered))


def test_an_out_of_memory_error_is_in_the_snapshot(tmp_path):
    seen = rehearsed(tmp_path, SCRIPT.replace("SIZE", "8192"), device="2GiB")
    assert not seen.answer.fits
    (events,) = seen.snapshot["device_traces"]
    failed = events[-1]
    assert failed["action"] == "oom"
    assert failed["size"] == seen.answer.out_of_memory[0].requested_bytes
    assert failed["size"] > failed["device_free"]


def test_a_scripts_own_calls_tell_what_it_has_allocated(tmp_path):
    seen = rehearsed(tmp_path, OWN)
    assert seen.answer.went_through, seen.answer.traceback
    assert not (tmp_path / "own.pickle").exists()  # as any file that it writes


def test_expandable_segments_have_addresses_that_browsers_can_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    seen = rehearsed(tmp_path, SCRIPT.replace("SIZE", "1024"))
    (events,) = seen.snapshot["device_traces"]
    assert all(event["addr"] < 2**53 for event in events)
    _, most = running(events, {"segment_map"}, {"segment_unmap"})
    assert most == seen.memory.peak_reserved_bytes
    assert all(one["is_expandable"] for one in seen.snapshot["segments"])
    assert (
        sum(one["total_size"] for one in seen.snapshot["segments"])
        == running(events, {"segment_map"}, {"segment_unmap"})[0]
    )


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    for file in (tmp_path, tmp_path / "nowhere" / "s.pickle"):
        with pytest.raises(ConfigError, match="writing"):
            dryfit.rehearse(tmp_path / "train.py", device="rtx4090", snapshot=file)


@pytest.mark.parametrize("name", ["snapshot", "trace"])
def test_a_file_that_is_no_view_is_left_alone(name, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with pytest.raises(ConfigError, match="there is a file that is no"):
        dryfit.rehearse(script, device="rtx4090", **{name: script})
    assert script.read_text() == SCRIPT


def test_an_earlier_view_is_replaced(tmp_path):
    first = rehearsed(tmp_path, SCRIPT.replace("SIZE", "512"))
    again = rehearsed(tmp_path, SCRIPT.replace("SIZE", "1024"))
    assert again.memory.peak_allocated_bytes > first.memory.peak_allocated_bytes
    assert again.snapshot != first.snapshot
