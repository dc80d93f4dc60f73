"""A device that does exactly what was planned, in place of one that is not there; comparing is done for real."""

from pathlib import Path

import torch

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.constants import DeviceConstants
from dryfit.plans.estimate import Device
from dryfit.processes.channel import ChildChannel
from dryfit.settings.files import write_model
from dryfit.settings.memory_terms import Confidence, DeviceSpec
from dryfit.settings.plan_messages import CalibrateRequest, CalibrateResult, Observation, PartPeak
from dryfit.training.calibrate import calibrate as real
from dryfit.training.calibrate import planned

WORKSPACE_BYTES = 8_519_680
CONTEXT_BYTES = 456 << 20
DEVICE = DeviceSpec(name="Stand-In 4000", capacity_bytes=24 << 30, capability=(8, 6))


def calibrate(body: CalibrateRequest, channel: ChildChannel) -> CalibrateResult:
    """Observe what a plan says, as if a device had followed it; compare as usual."""
    case = body.case
    if case is None:
        return real(body, channel)
    constants = DeviceConstants(CONTEXT_BYTES, WORKSPACE_BYTES, Confidence.UNCALIBRATED)
    plan, _ = planned(case, Device(DEVICE, constants, AllocatorSettings.of(case.allocator), torch.__version__))
    peaks = PartPeak(part="all", allocated_bytes=plan.peak_allocated_bytes, reserved_bytes=plan.peak_reserved_bytes)
    seen = Observation(
        case=case,
        device=DEVICE,
        torch=torch.__version__,
        parts=(peaks,),
        context_bytes=CONTEXT_BYTES,
        workspace_bytes=(WORKSPACE_BYTES, WORKSPACE_BYTES),
        steps=3,
    )
    write_model(Path(body.folder) / f"{case.name}.json", seen)
    return CalibrateResult(observation=seen)
