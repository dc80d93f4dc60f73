"""On a CUDA device: what is planned for is the device that is there.

python -m pytest tests/gpu -m gpu
"""

import pytest
import torch

from dryfit.preflight import smallest_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_device_that_is_there() -> None:
    spec = smallest_device(torch.cuda.device_count())
    _, total_bytes = torch.cuda.mem_get_info(0)
    assert spec.name == torch.cuda.get_device_name(0)
    assert spec.capacity_bytes == total_bytes
    assert spec.capability == torch.cuda.get_device_capability(0)
