"""bitsandbytes is imported without asking a hub for a kernel."""

import subprocess
import sys

import pytest

from parts import need_package

pytestmark = pytest.mark.heavy
CODE = """
import sys, types
from importlib.machinery import ModuleSpec
asked = []
kernels = types.ModuleType("kernels")
kernels.__spec__ = ModuleSpec("kernels", None)
kernels.get_kernel = lambda *args, **kwargs: asked.append(args)
if {there}:
    sys.modules["kernels"] = kernels
{how}
first = sys.modules["bitsandbytes"]
assert first is import_offline("bitsandbytes") and hasattr(first, "optim")
assert not asked, asked
assert sys.modules.get("kernels") is (kernels if {there} else None) and ({there} or "kernels" not in sys.modules)
"""


WAYS = {
    "ours": 'from dryfit.gpu.offline_import import import_offline\nimport_offline("bitsandbytes")',
    "a job": "import dryfit.training.plan_job\nimport peft\nfrom dryfit.gpu.offline_import import import_offline",
}


@pytest.mark.each_value
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("there", [True, False], ids=["with kernels", "without"])
def test_no_hub_is_asked_and_nothing_is_said(there: bool, how: str) -> None:
    need_package("bitsandbytes")
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(there=there, how=WAYS[how])],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


UNTOUCHED = """
import sys, types
import torch
asked, touched = [], []
nvml = types.ModuleType("pynvml")
nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
nvml.nvmlDeviceGetHandleByIndex = lambda index: index
nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: asked.append(handle) or (9, 0)
sys.modules["pynvml"] = nvml
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
torch.cuda._lazy_init = lambda: touched.append("initialised")
torch.cuda._get_nvml_device_index = lambda device: 5 + torch.cuda._utils._get_device_index(device)
torch._C._cuda_getCurrentRawStream = lambda index: 0  # as builds for CUDA have it
original = torch.cuda.get_device_capability
from dryfit.gpu.offline_import import import_offline
{how}
assert (asked, touched) == ([5, 6], []), (asked, touched)
assert torch.cuda.get_device_capability is original
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param('import_offline("bitsandbytes")', marks=pytest.mark.nightly),
        "import dryfit.training\nimport peft.tuners.lora",
    ],
)
def test_the_device_is_not_touched(how: str) -> None:
    """On a machine with GPUs: a process that is forked later must not have initialised CUDA."""
    need_package("bitsandbytes")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNTOUCHED.format(how=how)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
