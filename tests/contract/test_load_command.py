"""``dryfit load --check`` as a user meets it: what is printed, exit statuses, and what it costs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dryfit
import tiny
from dryfit.settings.errors import ConfigError, LoadError
from study_runs import command, run_here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.model(tmp_path / "model")


# In a small process of its own: a child's peak counts what its parent had at the fork, here all of pytest.
MEASURE = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1024 if sys.platform == "linux" else 1))
sys.exit(status)
"""


@pytest.mark.slow
def test_a_healthy_folder_as_json_at_a_small_price(folder: Path) -> None:
    words = command("load", "--check", folder, "--json")
    done = subprocess.run([sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer, peak_bytes = done.stdout.splitlines()
    health = json.loads(answer)
    assert (health["schema"], health["healthy"], health["task"]) == (1, True, "encoder")
    assert health["stored"]["files"][0]["name"] == "model.safetensors"
    if torch.version.cuda is None:  # the CUDA build's own libraries take more
        assert 200e6 < int(peak_bytes) < 500e6  # of the larger of the two processes


def test_an_unhealthy_folder_is_told_in_rows(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    gone = "encoder.layer.1.output.dense.weight"
    wrapped = {f"module.{key}": value for key, value in weights.items() if key != gone}
    save_file(wrapped, folder / "model.safetensors", metadata={"format": "pt"})
    done = run_here("load", "--check", folder)
    assert done.returncode == 1, done.stderr
    assert not done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()[:-1]]
    assert rows[0] == ["what", "found"]
    assert ["missing", gone] in rows
    assert ["names undone", "38 x module."] in rows
    assert ["filled", "36 of 37 tensors"] in rows
    assert done.stdout.splitlines()[-1] == "not healthy: 1 missing"


_KERNEL = "someone/evil-kernel"
_CODE = "code from elsewhere would be fetched and run"
_TRUST = "trust_remote_code = true runs what the model asks for: read it first"
_OWN = {"auto_map": {"AutoConfig": "someone/evil--own.Own", "AutoModel": "own.Own"}, "model_type": "unheard-of"}
_GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "tokenizer": "someone/evil"}}
_REMOTE = [
    ({"_attn_implementation": _KERNEL}, f", config.json: _attn_implementation is '{_KERNEL}': {_CODE}", _TRUST),
    ({"attn_implementation": _KERNEL}, f", config.json: attn_implementation is '{_KERNEL}': {_CODE}", _TRUST),
    ({"_experts_implementation": _KERNEL}, f", config.json: _experts_implementation is '{_KERNEL}': {_CODE}", _TRUST),
    (_OWN, f", config.json: auto_map.AutoConfig is 'someone/evil--own.Own': {_CODE}", _TRUST),
    (_GPTQ, ": its weights are quantised (quantization_config of 'gptq')", "take the model it was made of"),
    (
        {"quantization_config": "evil"},
        ", config.json: quantization_config is 'evil'",
        "an object, or a model without it",
    ),
]


def _changed(folder: Path, values: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values), encoding="utf-8")


@pytest.mark.parametrize(
    ("values", "found", "follows"),
    [_REMOTE[3], *(pytest.param(*case, marks=pytest.mark.slow) for case in (*_REMOTE[:3], *_REMOTE[4:]))],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_key_that_asks_for_code_from_elsewhere_is_refused_in_words(
    folder: Path, values: dict[str, Any], found: str, follows: str
) -> None:
    _changed(folder, values)
    done = run_here("load", "--check", folder)
    assert done.returncode == 1, done.stderr
    assert f"reading the config of {folder}{found}    [LOAD]\n" in done.stdout
    assert follows in done.stdout and "http" not in done.stdout


def test_a_damaged_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    done = run_here("load", "--check", folder, "--task", "masked-lm")
    assert done.returncode == 1, done.stderr
    assert f"reading the safetensors header of {file}" in done.stdout
    assert "it is cut short" in done.stdout
    assert "BertForMaskedLM" in done.stdout
    assert done.stdout.splitlines()[-1] == "not healthy: it cannot be opened"


def test_what_cannot_be_looked_at_ends_with_2(folder: Path, tmp_path: Path) -> None:
    for words, said in (
        ((tmp_path / "nowhere", "--check"), "there is no such folder"),
        ((folder / "config.json", "--check"), "it is a file"),
        ((folder,), f'dryfit.load("{folder}") in Python'),
        ((folder, "--json"), f"dryfit load --check {folder}"),
        ((folder, "--check", "--task", "spelling"), "there is no task 'spelling'"),
    ):
        done = run_here("load", *words)
        assert done.returncode == 2, words
        assert said in done.stderr
        assert not done.stdout


@pytest.mark.slow
def test_the_same_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    save_file({"x.q.lora_A.weight": torch.zeros(4, 8)}, adapter / "adapter_model.safetensors")
    found = dryfit.check(os.path.relpath(adapter))
    assert (found.healthy, found.missing, found.folder) == (False, ("x.q.lora_B.weight",), str(adapter))
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    with pytest.raises(LoadError, match="no such folder"):
        dryfit.check("nowhere")
    with pytest.raises(ConfigError, match="'encoder' was asked for"):
        dryfit.check(adapter, task="encoder")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
