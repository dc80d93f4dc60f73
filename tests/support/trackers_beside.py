"""Trackers and what they need, installed in a folder of their own, and a real MLflow server.

In the environment itself they would change what other libraries do: Lightning writes to TensorBoard as soon as it is
there, transformers calls whatever tracker it finds.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

PACKAGES = """
absl-py==2.5.1 blinker==1.9.0 cachetools==7.3.2 certifi==2026.10.18 cffi==2.1.1 charset-normalizer==3.5.2
cryptography==50.0.2 databricks-sdk==0.156.0 fastapi==0.165.0 flask==3.1.3 flask-cors==6.0.5 gitdb==4.0.12
gitpython==3.2.1 google-auth==2.62.2 graphene==3.4.3 graphql-core==3.3.2 graphql-relay==3.2.0 grpcio==1.85.1
importlib-metadata==9.1.0 itsdangerous==2.2.0 markdown==3.11.3 mlflow-skinny==3.17.2 mlflow==3.17.2
opentelemetry-api==1.45.2 opentelemetry-proto==1.45.2 opentelemetry-sdk==1.45.2
opentelemetry-semantic-conventions==0.66b2 pillow==13.0.0 prometheus-client==0.26.0 pyasn1==0.6.5
pyasn1-modules==0.4.2 pycparser==3.12 python-dotenv==1.2.4 requests==2.34.2 smmap==5.0.3 sqlparse==0.6.1
starlette==1.10.0 tensorboard==2.21.0 tensorboard-data-server==0.7.2 urllib3==2.8.0 uvicorn==0.54.0 werkzeug==3.1.9
zipp==4.1.2
"""

OF_WANDB = """
certifi==2026.10.18 charset-normalizer==3.5.2 cwevals==0.0.1b1 distro==1.9.0 googleapis-common-protos==1.76.0
httpcore==1.0.9 httpx==0.28.1 opentelemetry-api==1.45.2 opentelemetry-exporter-http-transport==0.66b2
opentelemetry-exporter-otlp-common==0.66b2 opentelemetry-exporter-otlp-proto-common==1.45.2
opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-proto==1.45.2 opentelemetry-sdk==1.45.2
opentelemetry-semantic-conventions==0.66b2 platformdirs==4.14.7 requests==2.34.2 sniffio==1.3.1 urllib3==2.8.0
wandb==0.31.0
"""

OF_TRACKIO = """
anyio==4.16.0 brotli==1.2.1 certifi==2026.10.18 click==8.5.1 gradio-client==2.7.2 h11==0.16.0 httpcore==1.0.9
httpx==0.28.1 idna==3.20 orjson==3.13.0 pillow==13.0.0 python-multipart==0.0.34 sniffio==1.3.1 starlette==1.10.0
trackio==0.43.0 uvicorn==0.54.0
"""

_START_S = 180.0


def install(folder: Path, packages: str = PACKAGES) -> Path:
    """Install packages into a new folder, and return it."""
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *packages.split()], check=True, timeout=600)
    return folder


def path_with(*folders: Path) -> str:
    """Return a PYTHONPATH with these folders behind what it has."""
    return os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), *map(str, folders)]).strip(os.pathsep)


class MlflowServer:
    """An MLflow server on a SQLite file, which can be killed, frozen and started again at the same place."""

    def __init__(self, folder: Path, packages: Path) -> None:
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._environment = os.environ | {
            "PYTHONPATH": path_with(packages),
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder}/mlflow.db",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": str(folder / "artifacts"),
            "PYTHONWARNINGS": "ignore",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "uvicorn", "--host", "127.0.0.1", "--port", str(self.port)]
        with (self._folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "mlflow.server.fastapi_app:app"], env=self._environment, stdout=log, stderr=log
            )
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.2)
        raise TimeoutError((self._folder / "log.txt").read_text("utf-8"))

    def kill(self) -> None:
        """Kill it: connections are refused."""
        self._process.kill()
        self._process.wait()

    def freeze(self, seconds: float) -> None:
        """Stop it for a while: connections are taken, and nobody answers until it goes on."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def mlflow_server(folder: Path, packages: Path) -> Generator[MlflowServer, None, None]:
    """Run a server while the context lasts."""
    server = MlflowServer(folder, packages)
    server.start()
    try:
        yield server
    finally:
        server.kill()


_READ = """
import json, sys
from mlflow import MlflowClient
from mlflow.entities import ViewType
client = MlflowClient(tracking_uri=sys.argv[1])
runs = []
experiments = [one.experiment_id for one in client.search_experiments()]
for run in client.search_runs(experiments, run_view_type=ViewType.ACTIVE_ONLY):
    metrics = {key: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, key)]
               for key in run.data.metrics}
    runs.append({"id": run.info.run_id, "name": run.info.run_name, "status": run.info.status, "metrics": metrics,
                 "params": run.data.params, "tags": run.data.tags})
print("ANSWER" + json.dumps(runs))
"""

_SCALARS = """
import json, sys
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
answer = {}
for file in Path(sys.argv[1]).rglob("events.out.tfevents.*"):
    one = EventAccumulator(str(file))
    one.Reload()
    answer[file.parent.name] = {tag: [[e.step, e.value] for e in one.Scalars(tag)] for tag in one.Tags()["scalars"]}
print("ANSWER" + json.dumps(answer))
"""

_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as pb

def records(file):  # blocks of LevelDB's log format behind a header of seven bytes
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""

answer = {}
for file in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")):
    one = {"history": [], "config": {}, "summary": {}, "exit": None}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            one |= {"id": run.run_id, "group": run.run_group, "project": run.project, "name": run.display_name}
            one["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            one["history"].append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
        elif kind == "summary":
            items = record.summary.update
            one["summary"] |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
        elif kind == "exit":
            one["exit"] = record.exit.exit_code
    answer.setdefault(one["id"], []).append(one)
print("ANSWER" + json.dumps(answer))
"""


_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
found = {}
for run in SQLiteStorage.get_run_records(sys.argv[1]):
    names = {"run": run["name"], "run_id": run["id"]}
    found[run["id"]] = {
        "name": run["name"],
        "rows": SQLiteStorage.get_logs(sys.argv[1], **names),
        "config": SQLiteStorage.get_run_config(sys.argv[1], **names),
    }
print("ANSWER" + json.dumps(found))
"""


def trackio_runs(project: str, packages: Path) -> str:
    """Return what Trackio has of a project on this machine, by run's id, as JSON."""
    return _asked(_TRACKIO, project, packages)


def wandb_runs(folder: Path, packages: Path) -> str:
    """Return what the client of Weights & Biases has put into a folder, by run's id, as JSON."""
    return _asked(_WANDB, str(folder), packages)


def mlflow_runs(url: str, packages: Path) -> str:
    """Return all runs that a server has, as JSON."""
    return _asked(_READ, url, packages)


def tensorboard_scalars(folder: Path, packages: Path) -> str:
    """Return what TensorBoard's own reader finds in a log directory, by run and tag, as JSON."""
    return _asked(_SCALARS, str(folder), packages)


def _asked(program: str, argument: str, packages: Path) -> str:
    command = [sys.executable, "-W", "ignore", "-c", program, argument]
    environment = os.environ | {"PYTHONPATH": path_with(packages)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("ANSWER")[2]
