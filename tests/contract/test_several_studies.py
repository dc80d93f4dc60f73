"""``dryfit tune A B C`` in real processes: one after another, each by itself, one answer; the same command goes on."""

import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import dryfit
from dryfit.settings.errors import ExitStatus
from dryfit.study.functions import Turn
from observers import Recorder
from study_runs import ends, fold, marked_processes, objective_study, run, run_here, start, wait_for


def write(folder: Path, name: str, function: str = "quadratic", mirror: str = "none") -> Path:
    file = folder / f"{name}.toml"
    study = f'name = "{name}"\ntrials = 2\nseed = 5'
    search = f'sampler = "random"\nmirror = "{mirror}"'
    text = objective_study(function, study=study, space='n = [1]\nkind = ["plain"]', search=search)
    file.write_text(text, encoding="utf-8")
    return file


def ledger_of(folder: Path) -> bytes:
    return (folder / "ledger.jsonl").read_bytes()


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], dict[str, object], str]:
    """Three studies, the second of which cannot import its function: the folder, the files, the answer, stderr."""
    folder = tmp_path_factory.mktemp("several")
    (folder / "c").mkdir()
    (write(folder, "c")).rename(folder / "c/study.toml")
    files = [write(folder, "a", mirror="journal"), write(folder, "b", "nothing"), folder / "c"]
    done = run("tune", *files, "--json", "--trials", "3")
    assert done.returncode == ExitStatus.CANNOT_RUN, done.stderr
    return folder, files, json.loads(done.stdout), done.stderr


def test_one_answer_for_all(first_run: tuple[Path, list[Path], dict[str, object], str]) -> None:
    folder, _, answer, errors = first_run
    assert (answer["schema"], answer["status"]) == (1, 2)
    studies = answer["studies"]
    assert isinstance(studies, list)
    told = [(one["study"], one["status"], one["end"], one["worked_on"]) for one in studies]
    assert told == [("a", 0, "done", True), ("b", 2, "error", True), ("c", 0, "done", True)]
    assert "objectives has no nothing" in studies[1]["error"]
    for name, one in zip("ac", (studies[0], studies[2]), strict=True):
        assert one["folder"] == str(folder / name)
        assert one["summary"] == json.loads(dryfit.status(folder / name).model_dump_json(by_alias=True))
        assert one["summary"]["trials"]["complete"] == 3  # --trials holds for all
    lines = errors.splitlines()
    heads = [line for line in lines if line in ("study 1 of 3: a", "study 2 of 3: b", "study 3 of 3: c")]
    assert heads == ["study 1 of 3: a", "study 2 of 3: b", "study 3 of 3: c"]
    assert any(line.startswith("study 1 of 3: a: done: 3 complete") for line in lines)
    assert any(line.startswith("study 2 of 3: b: could not run: importing objectives:nothing") for line in lines)


def test_the_same_command_again_leaves_alone_what_is_done(
    first_run: tuple[Path, list[Path], dict[str, object], str],
) -> None:
    folder, files, _, _ = first_run
    before = [ledger_of(folder / name) for name in "abc"]
    files[1].write_text(files[1].read_text().replace("objectives:nothing", "objectives:quadratic"))
    done = run_here("tune", *files, "--trials", "3")
    assert done.returncode == ExitStatus.DONE, done.stderr
    after = [ledger_of(folder / name) for name in "abc"]
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1].startswith(before[1]) and after[1] != before[1]
    heads, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    table = [dict(zip(heads, row, strict=True)) for row in rows]
    told = [[row[key] for key in ("study", "task", "complete", "of", "exit", "ended")] for row in table]
    assert told == [
        ["a", "objective", "3", "3", "0", "done before"],
        ["b", "objective", "3", "3", "0", "done"],
        ["c", "objective", "3", "3", "0", "done before"],
    ]
    assert {row["best"] for row in table} == {f"value {min(one.value or 0.0 for one in ends(folder / 'a')):.4f}"}
    assert ends(folder / "a") == ends(folder / "b") == ends(folder / "c")


class LetGo:
    """Looks, as a study begins, what is left of the one before it."""

    def __init__(self) -> None:
        self.opened: list[Path] = []
        self.left: list[object] = []
        self.held: list[tuple[int, int]] = []

    def on_turn(self, turn: Turn) -> None:
        """Look; nothing has been done for this study yet."""
        for before in self.opened:
            self.left += marked_processes(before)
            targets = (os.readlink(f"/proc/self/fd/{fd}") for fd in self._fds())
            self.left += [target for target in targets if target.startswith(f"{before}/")]
            with (before / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            closed = fold(before).sessions[-1].closed
            self.left += [] if closed == "done" else [closed]
        self.opened.append(turn.folder)
        self.held.append((len(list(self._fds())), threading.active_count()))

    @staticmethod
    def _fds() -> Iterator[str]:
        return (fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}"))


def test_a_study_lets_go_of_everything_before_the_next_begins(tmp_path: Path) -> None:
    files = [write(tmp_path, "a", mirror="journal"), write(tmp_path, "b")]
    watch = LetGo()
    result = dryfit.tune_all(files, trials=1, observers=[Recorder()], on_turn=watch.on_turn)
    assert [run.status for run in result.studies] == [0, 0]
    assert watch.opened == [tmp_path / "a", tmp_path / "b"]
    assert watch.left == []
    assert watch.held[0] == watch.held[1], "descriptors and threads"
    first, second = (fold(tmp_path / name) for name in "ab")
    assert first.created is not None and second.created is not None and first.created.id != second.created.id


def test_what_makes_no_sense_for_several_is_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a"), write(tmp_path, "b")
    done = run_here("tune", a, b, "--dir", tmp_path / "x", "--dry-run")
    assert done.returncode == ExitStatus.CANNOT_RUN
    assert "--dir, --dry-run beside them" in done.stderr and "with one study" in done.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 3, marks=pytest.mark.nightly)]
)
def test_a_signal_stops_the_one_that_runs_and_begins_no_further_one(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    files = [write(tmp_path, "a"), write(tmp_path, "b", "waits"), write(tmp_path, "c")]
    process = start("tune", *files, "--trials", "1")
    assert wait_for(lambda: (tmp_path / "b/trials/0000/attempt-1/checkpoints/attempt-1").exists(), process)
    process.send_signal(number)
    out, errors = process.communicate()
    assert process.returncode == status, errors
    assert [line.split("\t")[0] for line in out.splitlines()] == ["study", "a", "b", "c"]
    assert "not begun" in out and "the same command goes on" in errors
    assert not (tmp_path / "c").exists()
    assert marked_processes(tmp_path / "b") == []
    before = ledger_of(tmp_path / "a")
    done = run("tune", *files, "--trials", "1")
    assert done.returncode == 0, done.stderr
    assert ledger_of(tmp_path / "a") == before
    assert len(fold(tmp_path / "b").trials[0].attempts) == 2
    assert fold(tmp_path / "c").counted == 1
