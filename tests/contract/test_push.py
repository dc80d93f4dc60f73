"""``dryfit push`` against a hub on this machine: what arrives, what is refused, and what is never sent."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dryfit.documents.command_line import app

pytestmark = pytest.mark.heavy
TOKEN = "hf_of_the_test"


class Hub(ThreadingHTTPServer):
    """What ``huggingface_hub`` asks of a hub to make a repository and a commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}


class Asked(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.say(401, {"error": "Invalid username or password."})
            return
        match self.path.split("?")[0].rsplit("/", 1)[0].rpartition("/")[2], self.path:
            case "repos", _:
                self.server.created.append(json.loads(body))
                self.say(200, {"url": f"{self.url}/me/model", "name": "me/model"})
            case "preupload", _:
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                self.say(200, {"files": files, "commitOid": "0" * 40})
            case "commit", _:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                said = {"commitUrl": f"{self.url}/me/model/commit/1", "commitOid": "1" * 40, "success": True}
                self.say(200, said | {"pullRequestUrl": None})
            case _:
                self.say(200, {"errors": [], "warnings": []})  # the card's header is valid

    def do_GET(self) -> None:
        self.say(404, {"error": "Repository not found"})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def say(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "study" / "final" / "one" / "model"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "dryfit.json").write_text("{}")
    (folder / "README.md").write_text("---\nlibrary_name: dryfit\n---\n# A model\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "tokenizer" / "tokenizer.json").write_text('{"é": 1}')
    (tmp_path / "study" / "ledger.jsonl").touch()
    return folder


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["push", *map(str, arguments)])
    return result.exit_code, result.output + str(result.exception or "")


def test_every_file_arrives_as_it_is_in_a_private_repository(hub: Hub, model: Path):
    status, said = run(model, "me/model")

    assert status == 0, said
    assert f"http://127.0.0.1:{hub.server_port}/me/model/commit/1" in said
    assert hub.files == {str(file.relative_to(model)): file.read_bytes() for file in model.rglob("*") if file.is_file()}
    assert [(repo["name"], repo["organization"], repo["visibility"]) for repo in hub.created] == [
        ("model", "me", "private")
    ]


def test_public_and_json(hub: Hub, model: Path):
    status, said = run(model, "me/model", "--public", "--json")

    assert status == 0, said
    assert json.loads(said)["sizes"]["model.safetensors"] == 256 * 40
    assert hub.created[0]["visibility"] == "public"


def test_a_dry_run_asks_the_hub_nothing(hub: Hub, model: Path):
    status, said = run(model, "me/model", "--dry-run")

    assert status == 0, said
    assert "nothing was sent" in said and "tokenizer/tokenizer.json" in said
    assert not hub.created and not hub.files


def test_a_token_that_is_refused_is_said_without_being_told(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    status, said = run(model, "me/model")

    assert status != 0 and "refuses" in said and "HF_TOKEN" in said
    assert "hf_another" not in said and not hub.files


def test_a_study_is_none_of_its_models(hub: Hub, model: Path):
    status, said = run(model.parents[2], "me/model")

    assert status != 0 and "study's folder" in said and str(model) in said
    assert not hub.created


@pytest.mark.parametrize("name", ["me/model/more", "a b", "", "../x"])
def test_a_name_that_is_none(hub: Hub, model: Path, name: str):
    status, said = run(model, name)

    assert status != 0 and "no name of a repository" in said, said
    assert not hub.created


def test_a_link_is_not_followed(hub: Hub, model: Path):
    (model / "more").symlink_to("/etc")
    status, said = run(model, "me/model")

    assert status != 0 and "is a link" in said
    assert not hub.created


def test_no_hub_there(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    status, said = run(model, "me/model")

    assert status != 0 and "cannot be reached" in said
