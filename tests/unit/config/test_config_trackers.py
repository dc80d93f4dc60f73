"""Entries of ``study.track``: what they mean, and what is refused before anything runs."""

from pathlib import Path

import pytest

from dryfit.search import followers
from dryfit.search.followers import demand_trackers, server_trouble, target_environment
from dryfit.settings.errors import ConfigError, MachineError
from dryfit.settings.study_file_checks import tracker_of, tracker_problems
from dryfit.settings.study_file_reading import load_study_file


@pytest.mark.parametrize(
    "entry, found, hint",
    [
        ("tensorbord", 'is "tensorbord"', "did you mean tensorboard?"),
        ("MLFlow:env:A", 'is "MLFlow:env:A"', "did you mean mlflow?"),
        ("comet", 'is "comet"', ""),
        ("", 'is ""', ""),
        ("tensorboard:", 'is "tensorboard:"', ""),
        ("tensorboard:env:FOLDER", 'is "tensorboard:env:FOLDER"', ""),
        ("mlflow:", 'is "mlflow:"', ""),
        ("mlflow:env:", 'is "mlflow:env:"', ""),
        ("mlflow:env:1A", 'is "mlflow:env:1A"', ""),
        ("mlflow:server", 'is "mlflow:server"', ""),
        ("mlflow:http://a/ ", 'is "mlflow:http://a/ "', ""),
        ("wandb:", 'is "wandb:"', ""),
        ("wandb:a/b/c", 'is "wandb:a/b/c"', ""),
        ("wandb:env:PROJECT", 'is "wandb:env:PROJECT"', ""),
        ("trackio:", 'is "trackio:"', ""),
        ("trackio:a/b", 'is "trackio:a/b"', ""),
        ("trackio:env:PROJECT", 'is "trackio:env:PROJECT"', ""),
        ("trakio", 'is "trakio"', "did you mean trackio?"),
        (
            "wandb:0123456789abcdef0123456789abcdef01234567",
            "has what looks like a key in it",
            "keep it in the variable",
        ),
        ("mlflow:databricks://dapi0123456789abcdef0123", "has what looks like a key in it", "keep it in the variable"),
    ],
)
def test_a_wrong_entry_is_told(entry: str, found: str, hint: str) -> None:
    (problem,) = tracker_problems(("tensorboard", entry) if not entry.startswith("tensorboard") else (entry,))
    assert problem.path[:2] == ("study", "track")
    assert problem.found == found
    assert problem.allowed
    assert hint in problem.hint and bool(hint) == bool(problem.hint)


def test_each_target_stands_once() -> None:
    assert not tracker_problems(("tensorboard", "mlflow:env:A", "mlflow:env:B", "tensorboard:../all"))
    (problem,) = tracker_problems(("mlflow", "mlflow:env:MLFLOW_TRACKING_URI"))
    assert problem.path == ("study", "track", 1) and '"mlflow" means too' in problem.found
    assert len(tracker_problems(("tensorboard", "tensorboard"))) == 1


def test_slugs_are_names_of_files_and_differ() -> None:
    entries = ("tensorboard", "tensorboard:../all", "mlflow:http://a/b", "mlflow:http://a-b", "mlflow")
    slugs = [tracker_of(entry).slug for entry in entries]
    assert slugs[0] == "tensorboard" and slugs[4] == "mlflow"
    assert len(set(slugs)) == len(slugs)
    assert all("/" not in slug and ":" not in slug for slug in slugs)


def test_a_url_with_a_password_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text('[study]\ntrack = ["mlflow:https://me:hunter2hunter2@host"]\n', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_study_file(file)
    assert "study.track" in str(caught.value) and "mlflow:env:MLFLOW_TRACKING_URI" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_what_a_machine_lacks_is_told_before_the_first_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match="mlflow is not installed") as caught:
        monkeypatch.setattr(followers, "find_spec", lambda name: None)
        demand_trackers(["mlflow:env:SERVER"], tmp_path, {"SERVER": "http://x"})
    assert "pip install 'dryfit[mlflow]'" in str(caught.value)

    class Installed:
        origin = "somewhere"

    monkeypatch.setattr(followers, "find_spec", lambda name: Installed)
    with pytest.raises(MachineError, match="the environment variable SERVER is not set"):
        demand_trackers(["mlflow:env:SERVER"], tmp_path, {"SERVER": ""})
    with pytest.raises(MachineError, match=r'"mlflow:env:A" is the same target'):
        demand_trackers(["mlflow:env:A", "mlflow:env:B"], tmp_path, {"A": "http://x", "B": "http://x"})
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(MachineError, match="is no folder"):
        demand_trackers(["tensorboard:file/runs"], tmp_path, {})
    demand_trackers(["tensorboard", "tensorboard:not/yet", "mlflow:env:A"], tmp_path, {"A": "http://x"})


def test_a_process_has_its_own_secrets_only() -> None:
    environment = {
        "SERVER": "http://me:hunter2@x",
        "OTHER": "http://me:hunter3@x",
        "MLFLOW_TRACKING_TOKEN": "t",
        "HF_TOKEN": "h",
        "PATH": "/bin",
    }
    kept = target_environment(tracker_of("mlflow:env:SERVER"), environment)
    assert set(kept) == {"SERVER", "MLFLOW_TRACKING_TOKEN", "PATH"}
    assert set(target_environment(tracker_of("tensorboard"), environment)) == {"PATH"}


def test_a_server_that_is_not_there_is_known() -> None:
    mlflow = tracker_of("mlflow")
    assert "port 9: Connection refused" in server_trouble(mlflow, "http://127.0.0.1:9", {})
    assert server_trouble(mlflow, "http://[", {}) == "it is no URL"
    assert server_trouble(mlflow, "sqlite:///x.db", {}) == ""
    assert server_trouble(tracker_of("tensorboard"), "tensorboard", {}) == ""


def test_trackio_writes_to_a_folder_or_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        origin = "somewhere"

    monkeypatch.setattr(followers, "find_spec", lambda name: Installed)
    (tmp_path / "file").write_text("", encoding="utf-8")
    folder = {"TRACKIO_DIR": str(tmp_path / "file")}
    with pytest.raises(MachineError, match="is no folder"):
        demand_trackers(["trackio"], tmp_path, folder)
    server = {"TRACKIO_SERVER_URL": "http://127.0.0.1:9/?write_token=abcdefgh"}
    demand_trackers(["trackio:project"], tmp_path, {**folder, **server})
    trackio = tracker_of("trackio:project")
    assert server_trouble(trackio, trackio.where, {}) == ""
    assert "port 9: Connection refused" in server_trouble(trackio, trackio.where, server)
    assert set(target_environment(trackio, {**server, "HF_TOKEN": "h"})) == {"TRACKIO_SERVER_URL"}


def test_a_missing_key_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb = tracker_of("wandb:me/project")
    assert wandb.where == "me/project" and not tracker_problems((wandb.entry,))
    assert "WANDB_API_KEY" in server_trouble(wandb, wandb.where, {})
    assert server_trouble(wandb, wandb.where, {"WANDB_MODE": "offline"}) == ""
    assert server_trouble(wandb, wandb.where, {"WANDB_API_KEY": "k"}) == ""
