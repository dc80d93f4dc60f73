"""Reading an attempt's folder, the cgroup's counters and the children's environment."""

from pathlib import Path

import pytest

from dryfit.processes.attempt import child_log_tail, clear, read_messages, read_result
from dryfit.processes.child_spec import LineBuffer, child_environment
from dryfit.processes.node import memory_limit_bytes, oom_kills, rose
from dryfit.settings.jobs import ChildResult
from dryfit.settings.training_messages import TrainResult
from dryfit.settings.wire import MARKER_VARIABLE, Note, Phase


def test_an_empty_folder_says_nothing(tmp_path):
    assert read_messages(tmp_path) == [] and read_result(tmp_path) is None and child_log_tail(tmp_path) == ""


def test_torn_and_foreign_lines_do_not_hide_the_others(tmp_path):
    good = Phase(name="train", step=3).model_dump_json()
    (tmp_path / "messages.jsonl").write_text(f'{good}\n{{"type":"phase","na\n{good}\n{good[:10]}')
    messages = read_messages(tmp_path)
    assert messages[0] == messages[2] == Phase(name="train", step=3)
    assert len(messages) == 3 and isinstance(messages[1], Note) and "unreadable" in messages[1].text


@pytest.mark.parametrize("depth", [50, 300, 600, 100_000])
def test_a_line_of_any_depth_is_a_note(tmp_path, depth):
    (tmp_path / "messages.jsonl").write_text("[" * depth + "]" * depth + "\n")
    (message,) = read_messages(tmp_path)
    assert isinstance(message, Note) and "unreadable" in message.text
    (tmp_path / "result.json").write_text('{"train":' + "[" * depth + "]" * depth + "}")
    assert read_result(tmp_path) is None


def test_a_result_is_read_back_and_a_newer_one_is_none(tmp_path):
    result = ChildResult(TrainResult(value=0.5, best=1, steps=2))
    (tmp_path / "result.json").write_text(result.to_json())
    assert read_result(tmp_path) == result
    (tmp_path / "result.json").write_text('{"v": 2}')
    assert read_result(tmp_path) is None


def test_a_log_of_a_gigabyte_is_read_from_its_end(tmp_path):
    with (tmp_path / "log.txt").open("wb") as file:
        file.seek(2**30)
        file.write(b"\xff the end")
    tail = child_log_tail(tmp_path)
    assert tail.endswith("\ufffd the end") and len(tail) == 8192


def test_clearing_keeps_the_log_and_the_request(tmp_path):
    for name in ("messages.jsonl", "verdict.json", "stop", "beat", "result.json", "log.txt", "request.json"):
        (tmp_path / name).touch()
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "request.json"]


@pytest.mark.parametrize(
    ("membership", "counter"),
    [
        ("0::/a/b\n", "a/b/memory.events"),
        ("0::/gone\n", "memory.events"),
        ("4:cpu,memory:/a\n0::/\n", "memory/a/memory.oom_control"),
        ("4:memory:/gone\n", "memory/memory.oom_control"),
    ],
)
def test_the_count_is_found_in_both_versions(tmp_path: Path, membership, counter):
    (tmp_path / "membership").write_text(membership)
    path = tmp_path / "root" / counter
    path.parent.mkdir(parents=True)
    path.write_text("low 0\noom 9\noom_kill 3\noom_group_kill 1\n")
    assert oom_kills(tmp_path / "membership", tmp_path / "root") == 3


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a\n", {"a/memory.max": "1024", "memory.max": "4096"}, 1024),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        ("0::/gone\n", {"memory.max": "4096"}, 4096),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "2048"}, 2048),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/a\n", {}, None),
    ],
)
def test_the_limit_is_found_in_both_versions(tmp_path: Path, membership, files, limit):
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert memory_limit_bytes(tmp_path / "membership", tmp_path / "root") == limit
    assert memory_limit_bytes(tmp_path / "absent", tmp_path) is None


def test_where_nobody_counts_nothing_rose(tmp_path):
    assert oom_kills(tmp_path / "absent", tmp_path) is None
    assert not rose(None, 3) and not rose(3, None) and not rose(3, 3) and rose(3, 4)


def test_the_marker_wins_and_the_rest_is_kept():
    made = child_environment({"HOME": "/h", "OMP_NUM_THREADS": "8"}, "id", {"A": "b", MARKER_VARIABLE: "other"})
    assert (made["HOME"], made["OMP_NUM_THREADS"], made["A"], made[MARKER_VARIABLE]) == ("/h", "1", "b", "id")


def test_lines_are_cut_wherever_the_stream_is():
    lines = LineBuffer()
    assert [lines.feed(part) for part in (b"a", b"b\nc\nd", b"", b"\n")] == [[], [b"ab", b"c"], [], [b"d"]]
