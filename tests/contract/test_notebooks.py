"""dryfit in the kernel of a notebook, run headless: what is shown, watching, an interrupt, functions of a cell."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from study_runs import DEADLINE_S, fold, marked_processes, objective_study, wait_for, write_stepwise

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a kernel stays behind."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")


def executed(cells: list[str], folder: Path) -> list[Any]:
    """The outputs of each cell of a notebook that runs in a folder, but for stderr: tqdm misses its widgets there."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    run = NotebookClient(notebook, timeout=DEADLINE_S, resources={"metadata": {"path": str(folder)}}, allow_errors=True)
    every = [cell["outputs"] for cell in run.execute()["cells"]]
    return [[output for output in outputs if output.get("name") != "stderr"] for outputs in every]


def html_of(outputs: Any) -> str:
    """What a cell shows as HTML, and says as text."""
    shown = [output["data"] for output in outputs if "data" in output and "text/html" in output["data"]]
    assert len(shown) == 1 and shown[0]["text/plain"], outputs
    return shown[0]["text/html"]


def test_objects_are_shown_and_a_function_of_a_cell_is_refused_with_what_to_do(tmp_path: Path) -> None:
    kinds = 'n = [1]\nkind = ["plain", "<b>bold</b>"]'
    (tmp_path / "study.toml").write_text(objective_study("quadratic", space=kinds), encoding="utf-8")
    own = "from mine import own\nresult = dryfit.tune(objective=own, space={'x': [1, 2]}, study={'trials': 2})\nresult"
    outputs = executed(
        [
            "import dryfit\ndef own(trial):\n    return 1.0",
            "dryfit.tune(objective=own, space={'x': [1]})",
            "%%writefile mine.py\ndef own(trial):\n    return float(trial.params['x'])",
            own,
            "dryfit.tune('study.toml')\nstudy = dryfit.Study('.')\nstudy",
            "study.trials",
            "study.trial(0)",
            "study.report()",
            "study.watch()",
        ],
        tmp_path,
    )
    refused = outputs[1][0]
    assert refused["ename"] == "ObjectiveError" and "%%writefile" in refused["evalue"]
    assert "2 complete" in html_of(outputs[3])
    table = html_of(outputs[4])
    assert "<b>bold" not in table
    assert "param.kind" in html_of(outputs[5])
    assert "trial 0: complete" in html_of(outputs[6])
    assert "Best configuration" in html_of(outputs[7])
    (watched,) = outputs[8]  # one place, updated: nothing was added below it
    assert watched["output_type"] == "display_data" and "3/3 trials" in watched["data"]["text/html"]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path), startup_timeout=DEADLINE_S)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def answer(client: Any, asked: str) -> tuple[str, str]:
    """How a cell ended, and what it printed."""
    printed: list[str] = []
    while True:
        message = client.get_iopub_msg(timeout=DEADLINE_S)
        if message["parent_header"].get("msg_id") != asked:
            continue
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            printed.append(message["content"]["text"])
        if message["msg_type"] == "error":
            return message["content"]["ename"], "".join(printed)
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return "ok", "".join(printed)


def test_an_interrupt_stops_with_checkpoints_and_the_cell_goes_on(tmp_path: Path, kernel: tuple[Any, Any]) -> None:
    manager, client = kernel
    folder = write_stepwise(tmp_path / "slow")
    pause = "import os, dryfit\nos.environ['STEP_PAUSE_S'] = '0.3'\n"
    cell = pause + "result = dryfit.tune('slow')\nprint(result.end, result.study.summary.trials.running)"
    asked = client.execute(cell)
    ledger = folder / "ledger.jsonl"
    assert wait_for(lambda: ledger.exists() and b'"checkpoint"' in ledger.read_bytes())
    manager.interrupt_kernel()
    assert answer(client, asked) == ("ok", "interrupted 1\n")
    (trial,) = fold(folder).open_trials
    assert trial.attempts[-1].ended and trial.attempts[-1].checkpoint_step is not None
    assert wait_for(lambda: not marked_processes(folder))
    # The kernel lives, an interrupt is its own again, and the same cell goes on with the trial.
    said = answer(client, client.execute("import signal\nprint(signal.getsignal(2).__name__)"))
    assert said == ("ok", "default_int_handler\n")
    asked = client.execute(cell)
    assert wait_for(lambda: len(fold(folder).trials[trial.number].attempts) > len(trial.attempts))
    manager.interrupt_kernel()
    assert answer(client, asked)[0] == "ok"


def test_children_are_no_forks_of_the_kernel(tmp_path: Path, kernel: tuple[Any, Any]) -> None:
    _, client = kernel
    own = "import os\n\ndef own(trial):\n    return float(os.getppid())\n"
    (tmp_path / "where.py").write_text(own, encoding="utf-8")
    cell = (
        "import dryfit, os\nfrom where import own\n"
        "result = dryfit.tune(objective=own, space={'x': [1]}, study={'trials': 1})\n"
        "print(result.end, result.summary.best.value != os.getpid())"
    )
    assert answer(client, client.execute(cell)) == ("ok", "done True\n")


@pytest.mark.nightly
def test_the_notebook_of_five_minutes_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "five_minutes.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "outputs are not kept"
    run = NotebookClient(notebook, timeout=DEADLINE_S, resources={"metadata": {"path": str(tmp_path)}})
    cells = [cell for cell in run.execute()["cells"] if cell["cell_type"] == "code"]
    shown = [json.dumps(cell["outputs"]) for cell in cells]
    assert "8 complete" in shown[1] and "2 complete" in shown[5] and "fits" in shown[-1]
