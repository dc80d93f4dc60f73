"""The GitHub Action: its shell steps, run as GitHub runs them, on the example."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.heavy]
ROOT = Path(__file__).parents[2]


def act(folder: Path, outputs: Path, **given: str) -> dict[str, int]:
    """Run the shell steps in a folder; return the status of each."""
    action = yaml.safe_load((ROOT / ".github/actions/gpu-memory/action.yml").read_text(encoding="utf-8"))
    inputs = {name: str(one["default"]) for name, one in action["inputs"].items()} | given
    values = {f"inputs.{name}": value for name, value in inputs.items()}
    values["github.event.pull_request.html_url"] = "https://github.com/me/mine/pull/3"
    bin_folder = Path(sys.executable).parent
    surroundings = {
        "PATH": f"{outputs}:{bin_folder}:/usr/bin:/bin",
        "HOME": str(outputs),
        "RUNNER_TEMP": str(outputs),
        "GITHUB_OUTPUT": str(outputs / "output"),
        "GITHUB_STEP_SUMMARY": str(outputs / "summary.md"),
        "OMP_NUM_THREADS": "1",
        **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
    }
    ended: dict[str, int] = {}
    for step in action["runs"]["steps"]:
        if "if" in step and not given.get("token"):
            continue
        if (outputs / "output").exists():
            said = dict(line.split("=", 1) for line in (outputs / "output").read_text().splitlines())
            values |= {f"steps.check.outputs.{name}": value for name, value in said.items()}
        own = {name: str(text) for name, text in step["env"].items()}
        for name, text in own.items():
            for key, value in values.items():
                own[name] = text = text.replace(f"${{{{ {key} }}}}", value)
            assert "${{" not in text, text
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(command, cwd=folder, env={**surroundings, **own}, capture_output=True, check=False)
        ended[step["name"]] = done.returncode
    return ended


def test_a_pull_request_that_costs_memory_fails_with_a_comment_that_names_the_line(tmp_path: Path) -> None:
    folder, outputs = tmp_path / "project", tmp_path / "runner"
    shutil.copytree(ROOT / "examples" / "gpu_memory", folder)
    outputs.mkdir()
    gh = outputs / "gh"
    gh.write_text(f'#!/bin/sh\necho "$@" > {outputs}/commented\n', encoding="utf-8")
    gh.chmod(0o755)
    script = folder / "train.py"
    costs = "kept = torch.zeros(2**28, device=device)"
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("\nfor _ in", f"\n{costs}\nfor _ in", 1), encoding="utf-8")
    ended = act(folder, outputs, runs="small", token="secret")
    assert ended == {"install": 0, "check": 0, "comment": 0, "verdict": 1}
    summary = (outputs / "summary.md").read_text(encoding="utf-8")
    assert "**grew**" in summary and costs in summary and "+1,024.0 MiB" in summary
    assert (outputs / "commented").read_text().startswith("pr comment https://github.com/me/mine/pull/3")


def test_a_file_that_is_wrong_fails_without_a_comment(tmp_path: Path) -> None:
    ended = act(tmp_path, tmp_path, token="secret")
    assert ended == {"install": 0, "check": 0, "comment": 0, "verdict": 2}
    assert not (tmp_path / "summary.md").exists()
