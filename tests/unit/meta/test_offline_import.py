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
    "ours": 'from dryfit.meta.offline_import import import_offline\nimport_offline("bitsandbytes")',
    "a job": "import dryfit.jobs.plan\nimport peft\nfrom dryfit.meta.offline_import import import_offline",
}


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
