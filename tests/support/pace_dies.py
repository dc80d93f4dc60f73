"""A stand-in for the job PACE that raises."""

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import MachineError
from dryfit.core.jobs.diagnostics import PaceRequest, PaceResult


def dies(body: PaceRequest, channel: ChildChannel) -> PaceResult:
    del body, channel
    raise MachineError("timing steps", "this is a stand-in", "a machine")
