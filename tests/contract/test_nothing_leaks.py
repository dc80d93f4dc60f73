"""A real study with secrets around it and damage in its cache: neither secrets nor rows' texts are left anywhere."""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import optuna
import pytest
from safetensors.torch import load_file, save_file

import study_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
]

PLANTED = {
    "HF_TOKEN": "hf_planted-0001",
    "HUGGING_FACE_HUB_TOKEN": "hf_planted-0002",
    "WANDB_API_KEY": "planted-0003",
    "CLIENT_SECRET": "planted-0004",
    "PGPASSWORD": "planted-0005",
}
URL_PASSWORD = "planted-0006"
SECRETS = (*PLANTED.values(), URL_PASSWORD)


@dataclass(frozen=True)
class Leaks:
    """All that a study said and left behind."""

    folder: Path
    database: Path
    outputs: str
    command_lines: set[bytes]

    def files(self) -> Iterator[tuple[Path, bytes]]:
        """Every file of the study but the rows themselves."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and path.parent != self.folder / "data":
                yield path, path.read_bytes()


def command_lines() -> set[bytes]:
    """Command lines of all processes, as every user of the machine sees them."""
    found: set[bytes] = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(path.read_bytes())
        except OSError:
            continue
    return found


def watched(*words: str | Path) -> tuple[int, str, set[bytes]]:
    """Run a command to its end, looking at the processes of the machine all the time."""
    seen: set[bytes] = set()
    process = study_runs.start(*words)

    def ended() -> bool:
        seen.update(command_lines())
        time.sleep(0.05)  # a look at every process of the machine takes a while itself
        return process.poll() is not None

    study_runs.wait_for(ended)
    out, err = process.communicate()
    return process.returncode, out + err, seen


@pytest.fixture(scope="module")
def leaks(tmp_path_factory: pytest.TempPathFactory) -> Leaks:
    folder = tmp_path_factory.mktemp("leaks") / "study"
    database = folder.parent / "mirror.db"
    file = study_runs.write_study(folder, trials=1, rows=32)
    text = file.read_text().replace("epochs = 3", "epochs = 1")
    file.write_text(text.replace('mirror = "none"', 'mirror = "env:LEAKS_STORAGE"'))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PLANTED.items():
            patch.setenv(name, value)
        # SQLite ignores what it does not know, so that a URL with a password in it opens a real storage.
        patch.setenv("LEAKS_STORAGE", f"sqlite:///file:{database}?uri=true&mode=rwc&password={URL_PASSWORD}")
        status, said, seen = watched("tune", file)
        assert status == 0, said
        (cached,) = folder.glob("cache/*/train.safetensors")
        tensors = load_file(cached)
        tensors["labels"][5] = 7
        save_file(tensors, cached)
        status, more, seen_later = watched("resume", folder, "--trials", "2")
        assert status == 0, more
    return Leaks(folder, database, said + more, seen | seen_later)


def test_the_study_did_what_it_was_asked(leaks: Leaks) -> None:
    state = study_runs.fold(leaks.folder)
    assert [str(trial.outcome) for trial in state.trials] == ["complete", "failed"]
    storage = f"sqlite:///{leaks.database}"
    mirrored = optuna.load_study(study_name="study", storage=storage)
    assert [trial.state.name for trial in mirrored.trials] == ["COMPLETE", "FAIL"]
    assert any(b"search.follower_process" in line for line in leaks.command_lines)
    assert any(b"processes.fork_server" in line for line in leaks.command_lines)
    assert 'mirror = "env:LEAKS_STORAGE"' in (leaks.folder / "frozen.toml").read_text()


def test_the_guard_names_the_row_wherever_the_failure_is_told(leaks: Leaks) -> None:
    told = "label 7 in 1 row: r5"
    assert study_runs.fold(leaks.folder).trials[1].reason.startswith("data: checking the tokens of the split train")
    attempt = leaks.folder / "trials" / "0001" / "attempt-1"
    for path in (leaks.folder / "ledger.jsonl", attempt / "log.txt", attempt / "result.json"):
        assert told in path.read_text(), path
    assert told in leaks.outputs


def test_no_secret_is_anywhere(leaks: Leaks) -> None:
    found = [(path, secret) for path, data in leaks.files() for secret in SECRETS if secret.encode() in data]
    assert not found
    assert not [line for line in leaks.command_lines for secret in SECRETS if secret.encode() in line]
    assert not [secret for secret in SECRETS if secret in leaks.outputs]
    assert len(list(leaks.files())) > 20


def test_no_text_of_a_row_is_anywhere(leaks: Leaks) -> None:
    rows = [json.loads(line) for file in (leaks.folder / "data").iterdir() for line in file.read_text().splitlines()]
    texts = {" ".join(row["text"].split()[:3]) for row in rows}
    assert len(texts) > 50
    found = [(path, text) for path, data in leaks.files() for text in texts if text.encode() in data]
    assert not found
    assert not [text for text in texts if text in leaks.outputs]


def test_a_mirror_without_its_variable_is_refused_before_anything_runs(tmp_path: Path) -> None:
    assert "LEAKS_STORAGE" not in os.environ
    file = study_runs.write_study(tmp_path / "study", trials=1, rows=8)
    file.write_text(file.read_text().replace('mirror = "none"', 'mirror = "env:LEAKS_STORAGE"'))
    done = study_runs.run_here("tune", file)
    assert done.returncode == 2
    assert "the environment variable LEAKS_STORAGE is not set" in done.stderr
    assert not (tmp_path / "study" / "ledger.jsonl").exists()
