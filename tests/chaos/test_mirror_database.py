"""A mirror in a real PostgreSQL that stops and comes back: no trial notices, and nothing is missing in the end."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import optuna
import pytest

from dryfit.ledger.events import TrialFinished
from dryfit.ledger.folder import StudyLayout
from dryfit.search.followers import followed_bytes, trouble_of
from parts import need, need_package
from study_runs import events_of, fold, kill_now, run_here, start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="servers come as Debian packages")]

PASSWORD = "it's/planted+0001"
IN_URL = "it%27s%2Fplanted%2B0001"
TRIALS = 6

FUNCTION = """
import time
from pathlib import Path

GO = Path(__file__).parent.parent / "go"

def objective(trial):
    trial.report(trial.params["x"], 1)
    while not (GO / str(trial.number)).exists():
        time.sleep(0.02)
    return trial.params["x"]
"""

STUDY = f"""
[study]
name = "toy"
task = "objective"
trials = {TRIALS}

[objective]
function = "fit.py:objective"

[space]
x = {{low = 0.0, high = 1.0}}

[search]
sampler = "random"
pruner = "none"
mirror = "env:MY_STORAGE"
"""


@dataclass
class Server:
    """A PostgreSQL of this test alone. Root may not run one, so root becomes the user that the package made."""

    folder: Path
    port: int

    def __post_init__(self) -> None:
        self.user = "postgres" if os.geteuid() == 0 else None
        (self.folder / "password").write_text(PASSWORD)
        if self.user is not None:
            for path in (self.folder, self.folder / "password"):
                shutil.chown(path, self.user)
        self._run(
            "initdb", "--username=me", "--auth=scram-sha-256", f"--pwfile={self.folder / 'password'}", "--no-sync"
        )

    @property
    def url(self) -> str:
        return f"postgresql://me:{IN_URL}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        settings = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._run("-o", settings, "-l", str(self.folder / "log"), "-w", "start")

    def stop(self) -> None:
        self._run("-m", "immediate", "-w", "stop")

    def _run(self, *words: str) -> None:
        tool, *rest = words if words[0] == "initdb" else ("pg_ctl", *words)
        program = Path(need("pg_ctl")).resolve().with_name(tool)
        # The server must not hold a pipe of ours open.
        subprocess.run(
            [program, "-D", str(self.folder / "data"), *rest],
            user=self.user,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            check=True,
        )


@pytest.fixture
def server() -> Iterator[Server]:
    need("pg_ctl")
    need_package("psycopg")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    folder = Path(tempfile.mkdtemp(prefix="dryfit-postgres-"))  # below a folder that another user may enter
    made = Server(folder, port)
    made.start()
    try:
        yield made
    finally:
        if (folder / "data" / "postmaster.pid").exists():
            made.stop()
        shutil.rmtree(folder)


def finished(folder: Path) -> int:
    return sum(isinstance(event, TrialFinished) for event in events_of(folder))


def test_a_database_that_stops_and_comes_back(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("MY_STORAGE", server.url)
    folder, go = tmp_path / "study", tmp_path / "go"
    folder.mkdir()
    go.mkdir()
    (folder / "study.toml").write_text(STUDY, encoding="utf-8")
    (folder / "fit.py").write_text(FUNCTION, encoding="utf-8")
    layout = StudyLayout(folder)
    status = layout.mirror_status
    process = start("tune", folder, "--quiet")
    request.addfinalizer(lambda: kill_now(process))

    def complete() -> bool:
        return trouble_of(status) is None and followed_bytes(status) == layout.ledger.stat().st_size

    def mirrored() -> list[tuple[int, str, float | None, dict[int, float]]]:
        storage = optuna.storages.RDBStorage(server.url)
        try:
            found = optuna.load_study(study_name="toy", storage=storage).get_trials()
        finally:
            storage.remove_session()
            storage.engine.dispose()
        return [(trial.number, trial.state.name, trial.value, trial.intermediate_values) for trial in found]

    def recorded() -> list[tuple[int, str, float | None, dict[int, float]]]:
        return [
            (trial.number, "RUNNING" if trial.outcome is None else "COMPLETE", trial.value, {0: trial.params["x"]})
            for trial in fold(folder).trials
        ]

    (go / "0").touch()
    assert wait_for(lambda: finished(folder) >= 1 and complete(), process)
    assert mirrored()[0][1] == "COMPLETE"

    server.stop()
    for number in (1, 2, 3):
        (go / str(number)).touch()
    assert wait_for(lambda: finished(folder) >= 4 and trouble_of(status), process)  # no trial waited
    since_s, error = trouble_of(status) or (0.0, "")
    assert since_s > 0 and "OperationalError" in error
    assert run_here("status", folder).returncode == 0

    server.start()
    assert wait_for(complete, process)  # while the study runs
    assert process.poll() is None
    assert [row[:3] for row in mirrored()] == [row[:3] for row in recorded()]

    server.stop()
    for number in range(TRIALS):
        (go / str(number)).touch()
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert trouble_of(status) is not None

    server.start()
    done = run_here("resume", folder)  # all trials are done: it gives the mirror what it lacks
    assert done.returncode == 0, done.stderr
    assert mirrored() == recorded()
    assert len(mirrored()) == TRIALS

    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    texts += [text.encode() for text in (output, errors, done.stdout, done.stderr)]
    assert not [text for text in texts for form in (PASSWORD, IN_URL, repr(PASSWORD)[1:-1]) if form.encode() in text]
