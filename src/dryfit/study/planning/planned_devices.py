"""The kinds of device that a study's trials are planned for: a limited CPU, or each model of GPU of its nodes."""

from collections.abc import Collection
from typing import Final

from dryfit.core.jobs.train import ResolveResult
from dryfit.core.settings.execution import DeviceKind, DeviceSpec, ExecutionSettings
from dryfit.core.settings.known_devices import parse_device
from dryfit.core.text.units import parse_bytes
from dryfit.runtime.machine.node import DeviceFacts
from dryfit.store.state import PlanState, TrialState
from dryfit.study.trials.context import AnyStudy

_STEP_BYTES: Final = 128 * 2**20
"""Memory is counted in such steps: drivers and torch tell some MiB more or less of GPUs of one model."""

_AS_LARGE: Final = 1.02
"""The size of a GPU that is expected is that of a table, up to 0.2 GiB from what a driver says."""


def planning_device(resolved: ResolveResult, execution: ExecutionSettings) -> DeviceSpec | None:
    """Return the device of this machine that trials are planned for; None if they are not planned.

    On the CPU only a limit gives a plan something to keep to.
    """
    limit_bytes = parse_bytes(execution.memory_limit) if execution.memory_limit is not None else None
    if resolved.device is DeviceKind.CUDA:
        return _limited(resolved.device_spec, execution)
    if limit_bytes is None:
        return None
    return DeviceSpec(name="the CPU", kind=DeviceKind.CPU, capacity_bytes=limit_bytes)


def kind_of(device: DeviceFacts, study: AnyStudy) -> DeviceSpec | None:
    """Return the kind of a CUDA device; of one that its driver does not describe that of the first machine.

    Where machines join, or this one has GPUs that are not alike, memory is counted in whole steps, so that GPUs of one
    model are of one kind.
    """
    spec = device.spec if device.spec is not None else study.resolved.device_spec
    several = study.config.nodes is not None or len(set(study.resolved.device_specs)) > 1
    if spec is not None and several:
        spec = spec.model_copy(update={"capacity_bytes": max(1, spec.capacity_bytes // _STEP_BYTES) * _STEP_BYTES})
    return _limited(spec, study.config.execution)


def planned_devices(study: AnyStudy) -> tuple[DeviceSpec, ...]:
    """Return every kind of device that trials may run on now, smallest first; none if trials are not planned.

    A GPU that the study file expects is among them until one as large is there.
    """
    config, resolved = study.config, study.resolved
    if config.objective is not None:
        return ()  # what it calls is not rehearsed
    devices = [device for node in study.nodes.values() for device in node.devices]
    if resolved.device is not DeviceKind.CUDA or not (devices or config.nodes is not None):
        one = planning_device(resolved, config.execution)
        return () if one is None else (one,)
    every = [kind for device in devices if (kind := kind_of(device, study)) is not None]
    kinds = list(dict.fromkeys(every))
    if config.nodes is not None and config.nodes.expect is not None:
        expected = _limited(parse_device(config.nodes.expect), config.execution)
        if expected is not None and all(one.capacity_bytes * _AS_LARGE < expected.capacity_bytes for one in kinds):
            kinds.append(expected)
    return tuple(sorted(kinds, key=lambda kind: (kind.capacity_bytes, kind.name)))


def plan_here(kinds: Collection[DeviceSpec], trial: TrialState) -> PlanState | None:
    """Return the plan by which a trial is trained once more: for a device that is here, or else its last one.

    Args:
        kinds: Of :func:`planned_devices`, here.
        trial: The trial.
    """
    plans = (trial.plan, *trial.plans.values())
    here = (plan for plan in plans if plan is not None and plan.answer.verdict.fits and plan.answer.device in kinds)
    return next(here, trial.plan)


def like(kind: DeviceSpec, other: DeviceSpec) -> bool:
    """Whether two kinds are one model of GPU, whatever memory it has."""
    return (kind.name, kind.capability) == (other.name, other.capability)


def _limited(spec: DeviceSpec | None, execution: ExecutionSettings) -> DeviceSpec | None:
    """Return a device with no more memory than the study file allows."""
    if spec is None or execution.memory_limit is None:
        return spec
    return spec.model_copy(update={"capacity_bytes": min(spec.capacity_bytes, parse_bytes(execution.memory_limit))})
