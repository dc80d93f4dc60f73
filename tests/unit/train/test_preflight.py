from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import tiny
import trials
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.errors import ConfigError, DataError, MachineError
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, smallest_device
from dryfit.settings.tables import DataSettings, TrialSettings
from dryfit.settings.training_messages import ResolveRequest
from dryfit.training.device import check_precisions, find_device
from dryfit.training.resolve import device_specs, resolve
from trials import ScriptedChannel


def test_resolve_says_what_it_found(tmp_path: Path) -> None:
    trial = trials.small(tmp_path, encoder=tiny.model(tmp_path / "model"))
    result = trial.resolve()
    assert {name: facts.rows for name, facts in result.splits.items()} == {"train": 40, "validation": 20}
    assert sum(result.splits["train"].label_counts.values()) == 40
    assert (result.device, result.device_count) == (DeviceKind.CPU, 1)
    assert result.versions["torch"] == torch.__version__.split("+")[0] or torch.__version__ in result.versions["torch"]
    assert result.device_spec is None
    assert list(result.revisions) == [str(tmp_path / "model")]
    assert trial.resolve() == result
    tiny.write_jsonl(tmp_path / "data" / "train.jsonl", tiny.rows(40, seed=8))
    assert trial.resolve().data_fingerprint != result.data_fingerprint


def test_devices_and_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == (DeviceKind.CPU, 1)
    with pytest.raises(MachineError, match="finds no CUDA device"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert find_device("auto") == find_device("cuda") == (DeviceKind.CUDA, 3)
    assert find_device("cpu") == (DeviceKind.CPU, 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old One")
    check_precisions(("fp32", "fp16"), DeviceKind.CUDA)
    check_precisions(("fp32", "bf16"), DeviceKind.CPU)
    with pytest.raises(ConfigError, match="Old One has no bf16"):
        check_precisions(("bf16",), DeviceKind.CUDA)
    for wanted in ("fp16", "tf32"):
        with pytest.raises(ConfigError, match="it needs a CUDA device"):
            check_precisions((wanted,), DeviceKind.CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(ConfigError, match="Old One has no tf32"):
        check_precisions(("tf32",), DeviceKind.CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6))
    check_precisions(("tf32",), DeviceKind.CUDA)


def test_more_processes_than_devices_are_refused_before_a_row_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dryfit.training.resolve.find_device", lambda _: (DeviceKind.CUDA, 3))
    nowhere = tmp_path / "nowhere.jsonl"
    body = ResolveRequest(
        task=BuiltInTask.CRITERIA,
        data=DataSettings(train=str(nowhere), validation=str(nowhere)),
        settings=TrialSettings(),
        pairs=(),
        cache_dir=str(tmp_path),
        device="cuda",
    )
    for processes, error in ((4, MachineError), (3, DataError)):
        with pytest.raises(error) as caught:
            resolve(body.model_copy(update={"processes": processes}), ScriptedChannel(tmp_path / "resolve"))
        assert ("there are 3 CUDA device(s)" in str(caught.value)) is (processes == 4)


def test_the_smallest_device_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [
        SimpleNamespace(name="Large", total_memory=80, major=9, minor=0),
        SimpleNamespace(name="Small", total_memory=24, major=8, minor=9),
        SimpleNamespace(name="Equal", total_memory=24, major=8, minor=0),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    assert [spec.name for spec in device_specs(3)] == ["Large", "Small", "Equal"]
    assert smallest_device(device_specs(3)) == DeviceSpec(name="Small", capacity_bytes=24, capability=(8, 9))
    assert smallest_device(device_specs(1)) == DeviceSpec(name="Large", capacity_bytes=80, capability=(9, 0))
    assert smallest_device(()) is None


def test_weights_are_told_to_the_byte(tmp_path: Path) -> None:
    encoder = tiny.model(tmp_path / "model")
    trial = trials.small(tmp_path, encoder=encoder)
    stored = load_file(encoder / "model.safetensors")
    without_pooler = sum(tensor.nbytes for name, tensor in stored.items() if "pooler" not in name)
    assert trial.resolve().weights_bytes == {str(encoder): without_pooler}
