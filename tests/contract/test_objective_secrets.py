"""Studies of a user's own function among secrets: it has those that it names, and no file of the study has any."""

import base64
import json
import os
import shlex
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from study_runs import fold, run_here

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

QUOTED = 'it\'s "planted\\0001"\n/é+😀 end'
PEM = "-----BEGIN PLANTED KEY-----\nplanted+line/0002aaaa\nplanted+line/0003bbbb\n-----END PLANTED KEY-----\n"
PLANTED = {
    "MY_API_KEY": QUOTED,
    "HF_TOKEN": "hf_planted-0004",
    "AWS_SECRET_ACCESS_KEY": "planted/+0005==",
    "AWS_SESSION_TOKEN": "planted-0006",
    "PGPASSWORD": "planted-0007",
    "SIGNING_KEY": PEM,
    "DATABASE_URL": "postgresql://me:planted-0008@db/x",
}
PARTS = (QUOTED, "planted+line/0002aaaa", "planted-0008", *(value for value in PLANTED.values() if value != PEM))

WAYS = ["repr", "note", "none"]

FUNCTION = '''
import json, os
from pathlib import Path

HERE = Path(__file__).parent
PLANTED = json.loads((HERE.parent / "planted.json").read_text())


def environments():
    """The planted values in the environment of each process of the study, as the kernel shows it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        of_study = f"DRYFIT_STUDY={os.environ['DRYFIT_STUDY']}".encode() in environment
        if of_study or "dryfit.search.follower_process" in command:
            values = {name: os.fsencode(value) in environment for name, value in PLANTED.items()}
            found[f"{folder.name} {command}"] = [name for name, there in values.items() if there]
    return found


(HERE.parent / "import.json").write_text(json.dumps({name: os.environ.get(name) for name in PLANTED}))


def objective(trial):
    has = {name: os.environ.get(name) for name in PLANTED}
    said = HERE.parent / f"{trial.params['way']}.json"
    said.write_text(json.dumps({"has": has, "shown": environments()}))
    everything = list(PLANTED.values())
    match trial.params["way"]:
        case "repr":
            raise RuntimeError(f"no access with {everything!r}")
        case "note":
            error = KeyError(PLANTED["MY_API_KEY"])
            error.add_note("sent " + PLANTED["PGPASSWORD"])
            raise error
        case _:
            return 1.0
'''

STUDY = f"""
[study]
name = "own"
task = "objective"
trials = {len(WAYS)}

[objective]
function = "fit.py:objective"
secrets = ["MY_API_KEY"]

[space]
way = {json.dumps(WAYS)}

[search]
sampler = "random"
enqueue = [{", ".join(f'{{way = "{way}"}}' for way in WAYS)}]

[runtime]
max_failed_in_a_row = 100
retries = 0
"""


def written(secret: str) -> list[bytes]:
    """A secret as files might have it."""
    plain = (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret, safe=""), shlex.quote(secret))
    coded = base64.b64encode(f"me:{secret}".encode()).decode()
    return [text.encode() for text in (*plain, json.dumps(repr(secret))[2:-2], coded[4:-4])]


@pytest.fixture(params=["forkserver", "fresh"])
def study(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "fit.py").write_text(FUNCTION, encoding="utf-8")
    (folder / "study.toml").write_text(STUDY + f'isolation = "{request.param}"\n', encoding="utf-8")
    (tmp_path / "planted.json").write_text(json.dumps(PLANTED))
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    return folder


def test_a_function_has_the_secrets_it_names_and_no_file_has_any(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_here("tune", study)
    assert done.returncode == 0, done.stderr
    reported = run_here("report", study)
    assert reported.returncode == 0, reported.stderr
    outcomes = [str(trial.outcome) for trial in fold(study).trials]
    assert outcomes == ["failed"] * (len(WAYS) - 1) + ["complete"]

    only = {name: QUOTED if name == "MY_API_KEY" else None for name in PLANTED}
    assert json.loads((study.parent / "import.json").read_text()) == only
    for way in WAYS:
        facts = json.loads((study.parent / f"{way}.json").read_text())
        assert facts["has"] == only
        commands = " ".join(facts["shown"])
        assert "dryfit.search.follower_process" in commands and "dryfit.processes" in commands
        assert not any(facts["shown"].values()), facts["shown"]  # no process was started with any of them

    texts = {path: path.read_bytes() for path in sorted(study.rglob("*")) if path.is_file()}
    texts |= {Path("terminal"): f"{done.stdout}{done.stderr}{reported.stdout}".encode()}
    assert len(texts) > 3 * len(WAYS)
    found = [
        (str(path), form) for path, text in texts.items() for part in PARTS for form in written(part) if form in text
    ]
    assert not found
    ledger = (study / "ledger.jsonl").read_text()
    assert all(f"<{name}>" in ledger for name in PLANTED)


def test_a_secret_that_is_not_there_is_refused_before_anything_runs(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_API_KEY")
    done = run_here("tune", study)
    assert done.returncode == 2
    assert "MY_API_KEY" in done.stderr and "objective.secrets" in done.stderr
    assert not (study / "ledger.jsonl").exists()


def test_a_name_that_no_variable_can_have_is_refused(study: Path) -> None:
    done = run_here("tune", study, "--set", 'objective.secrets=["MY KEY"]')
    assert done.returncode == 2
    assert "objective.secrets" in done.stderr
    assert "MY_API_KEY" in os.environ
