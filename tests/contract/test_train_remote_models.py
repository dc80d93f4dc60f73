"""Models of the hub (a cache laid by hand, offline) and models with code of their own, in an interpreter of their own:
the libraries read the cache's place when they are imported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from study_runs import DEADLINE_S

pytestmark = pytest.mark.slow

COMMITS = {"main": "a" * 40, "second": "b" * 40}
SCRIPT = """
import json, sys
import trials
from pathlib import Path
from dryfit.settings.errors import DryfitError
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_config

def run(folder, encoder, **model):
    trial = trials.small(Path(folder), encoder=encoder, model=model)
    revisions = trial.resolve().revisions
    return revisions, trial.run()[0].value

folder, own = sys.argv[1:]
found = {"main": run(folder + "/main", "someone/tiny")}
found["second"] = run(folder + "/second", "someone/tiny", revision="second")
try:
    run(folder + "/untrusted", own)
    found["untrusted"] = "ran"
except DryfitError as error:
    found["untrusted"] = error.code + ": " + error.allowed
try:
    load_config(FolderSource("someone/own"))
except DryfitError as error:
    found["untrusted of the hub"] = str(error)
found["trusted"] = run(folder + "/trusted", own, trust_remote_code=True)
from dryfit.tasks.saved_models import load
found["loaded"] = type(load(folder + "/trusted/best", trust=True).encoder).__name__
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    home = tmp_path_factory.mktemp("home")
    repo = home / "hub" / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    for seed, (name, commit) in enumerate(COMMITS.items()):
        tiny.model(repo / "snapshots" / commit, seed=seed)
        (repo / "refs" / name).write_text(commit)
    own = tiny.own_code(tiny.model(home / "own"))
    kept = repo.with_name("models--someone--own")
    shutil.copytree(own, kept / "snapshots" / COMMITS["main"])
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(COMMITS["main"])
    environment = os.environ | {
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(tiny.__file__).parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(home / "run"), str(own)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_revision_chooses_the_weights_and_the_commit_is_recorded(found: dict) -> None:
    assert found["main"][0] == {"someone/tiny": COMMITS["main"]}
    assert found["second"][0] == {"someone/tiny": COMMITS["second"]}
    assert found["main"][1] != found["second"][1]


def test_code_that_comes_with_a_model_runs_only_where_trusted(found: dict) -> None:
    assert found["untrusted"].startswith("LOAD: ")
    assert found["untrusted"] == "LOAD: a model without it"
    refused = "reading the config of someone/own, config.json: auto_map.AutoConfig is 'own_code.OwnConfig': code from"
    assert refused in found["untrusted of the hub"]
    assert found["trusted"][1] > 0
    assert found["loaded"] == "OwnModel"
