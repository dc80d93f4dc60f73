"""Runs a calibration case on the first CUDA device, as a script: ``observed_case.py CASE.json PEAKS.json``.

On a virtual GPU, without the scratch memory that plans leave out because it cannot be interpolated.
"""

import sys
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dryfit.gpu.recorder import StorageRecorder
from dryfit.settings.plan_messages import MemoryCase, PartPeak
from dryfit.training.measured_step import CudaMeter, run_case

case = MemoryCase.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
for mode in _get_current_dispatch_mode_stack():
    if isinstance(mode, StorageRecorder):
        mode.processors = None
meter = CudaMeter()
torch.set_num_threads(1)
run_case(case, "cuda", meter)
Path(sys.argv[2]).write_bytes(TypeAdapter(list[PartPeak]).dump_json(meter.parts))
