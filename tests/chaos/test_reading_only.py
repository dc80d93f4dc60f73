"""Studies that a command may only read: those of other users, without write permission, on a read-only mount."""

import os
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from study_runs import DEADLINE_S, command_after, fold, kill_now, start, tune_to_end, wait_for, write_stepwise

NOBODY = 65534
POWERLESS = "import ctypes; [ctypes.CDLL(None).prctl(24, power, 0, 0, 0) for power in (1, 2, 3)]"
"""Root without the capabilities to pass over permissions (DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER); others have none."""
MOUNTED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, flags):
    if libc.mount(source, target, None, flags, None):
        sys.exit(77)
if libc.unshare(0x20000):  # CLONE_NEWNS: nobody else sees the mount
    sys.exit(77)
mount(None, b"/", 0x44000)  # MS_REC | MS_PRIVATE
mount({0!r}, {0!r}, 0x1000)  # MS_BIND
mount(None, {0!r}, 0x1021)  # MS_BIND | MS_REMOUNT | MS_RDONLY
"""
ANOTHER_USER = f"""
import ctypes
libc = ctypes.CDLL(None)
libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
if libc.capset(header, (ctypes.c_uint32 * 6)(4, 4, 4, 0, 0, 0)):  # CAP_DAC_READ_SEARCH alone: this Python may be root's
    sys.exit(77)
if libc.prctl(47, 2, 2, 0, 0):  # PR_CAP_AMBIENT, which a new program keeps
    sys.exit(77)
"""
READERS = (("status",), ("show", "0", "--json"), ("status", "--watch"))
WRITERS = (("tune",), ("report",), ("export", "--to", "csv"))
KINDS = ["without permission to write", "of another user", "on a read-only mount"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    return request.param


@pytest.fixture(scope="module")
def study(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Path, None, None]:
    """A finished study that its reader cannot write to."""
    folder = tune_to_end(write_stepwise(tmp_path_factory.mktemp("theirs") / "study"))
    inside = [folder, *folder.rglob("*")]
    for path in inside:
        if kind == "without permission to write":
            path.chmod(0o555 if path.is_dir() else 0o444)
        elif kind == "of another user":
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    yield folder
    for path in inside:
        path.chmod(0o755)


def run(kind: str, study: Path, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    setup = MOUNTED.format(os.fsencode(study)) if kind == "on a read-only mount" else POWERLESS
    argv = command_after(setup, command, study, *options)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode == 77:
        pytest.skip("no mounts here")
    assert "Traceback" not in done.stderr, done.stderr
    return done


def looks(folder: Path) -> dict[Path, tuple[int, int]]:
    """Everything in a folder, and when it was changed."""
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in (folder, *folder.rglob("*"))}


@pytest.mark.each_value
@pytest.mark.parametrize("words", [READERS[0], *(pytest.param(words, marks=pytest.mark.slow) for words in READERS[1:])])
def test_a_study_that_cannot_be_written_to_can_be_read(words: tuple[str, ...], kind: str, study: Path) -> None:
    before = looks(study)
    done = run(kind, study, *words)
    assert done.returncode == 0, done.stderr
    assert "complete" in done.stdout
    assert looks(study) == before


@pytest.mark.slow
@pytest.mark.every(3)
def test_a_report_and_an_export_of_it_can_be_written_elsewhere(kind: str, study: Path, tmp_path: Path) -> None:
    before = looks(study)
    for words in WRITERS[1:]:
        target = tmp_path / words[-1]
        done = run(kind, study, *words, "-o", str(target))
        assert done.returncode == 0, done.stderr
        assert target.stat().st_size > 0
    assert run(kind, study, "stop").returncode == 1, "nobody runs it"
    assert looks(study) == before


@pytest.mark.each_value
@pytest.mark.parametrize(
    "words", [WRITERS[1], *(pytest.param(words, marks=pytest.mark.slow) for words in WRITERS[::2])]
)
def test_what_must_write_to_it_says_so(words: tuple[str, ...], kind: str, study: Path) -> None:
    before = looks(study)
    done = run(kind, study, *words)
    assert done.returncode == 2 and "[MACHINE]" in done.stderr, done.stderr
    assert words[0] in ("tune", "resume") or "-o FILE" in done.stderr
    assert looks(study) == before


@pytest.fixture
def open_folder() -> Generator[Path, None, None]:
    """A folder that others may look into; those of pytest are private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_watch_a_study_that_runs_and_change_nothing(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_PAUSE_S", "20")
    study = write_stepwise(open_folder / "study")
    process = start("tune", study, "--quiet")
    assert wait_for(lambda: (study / "ledger.jsonl").exists() and fold(study).open_trials, process)
    found = {"status": (0, f"process {process.pid} runs it"), "show": (0, "open"), "show 0": (0, "attempt 1")}
    found |= dict.fromkeys(("stop", "resume"), (2, "Permission denied"))
    for words, (status, said) in found.items():
        command, *options = words.split()
        argv = command_after(ANOTHER_USER, command, study, *options)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode == 77:
            pytest.skip("no capabilities here")
        assert (done.returncode, said in done.stdout + done.stderr) == (status, True), done.stderr
        assert "Traceback" not in done.stderr
    assert process.poll() is None
    kill_now(process)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "ledger.jsonl"])
def test_what_must_not_even_be_read_is_said(name: str, kind: str, study: Path) -> None:
    if kind != "of another user":
        pytest.skip("the other kinds are as one's own")
    (study / name).chmod(0o600)
    done = run(kind, study, "status")
    (study / name).chmod(0o755)
    assert done.returncode == 2 and str(study / name) in done.stderr, done.stderr
