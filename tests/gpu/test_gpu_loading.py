"""On a CUDA device: weights go straight to it, ties and tables included, and a re-run is exact.

python -m pytest tests/gpu -m gpu
"""

from pathlib import Path

import pytest
import torch

import dryfit
import tiny


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_model_on_the_device_equals_the_one_on_the_host(tmp_path: Path, dtype: torch.dtype | None) -> None:
    folder = tiny.model(tmp_path / "model")
    host, device = dryfit.load(folder, dtype=dtype), dryfit.load(folder, dtype=dtype, device="cuda")
    want = dict(host.named_parameters()) | dict(host.named_buffers())
    have = dict(device.named_parameters()) | dict(device.named_buffers())
    assert want.keys() == have.keys()
    for name, tensor in have.items():
        assert tensor.device.type == "cuda", name
        assert torch.equal(tensor.cpu(), want[name]), name


def test_loading_takes_the_weights_and_little_more(tmp_path: Path) -> None:
    folder = tiny.model(tmp_path / "model")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = dryfit.load(folder, device="cuda")
    weights_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    blocks = len(list(model.parameters())) + len(list(model.buffers()))
    assert torch.cuda.max_memory_allocated() - before <= weights_bytes + 512 * blocks


def test_moving_there_and_back_changes_nothing(tmp_path: Path) -> None:
    model = dryfit.load(tiny.model(tmp_path / "model"))
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dryfit.meta.move(dryfit.meta.move(model, "cuda"), "cpu")
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())
