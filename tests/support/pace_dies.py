"""A stand-in for the job PACE that raises."""

from dryfit.processes.channel import ChildChannel
from dryfit.settings.check_messages import PaceRequest, PaceResult
from dryfit.settings.errors import MachineError


def dies(body: PaceRequest, channel: ChildChannel) -> PaceResult:
    del body, channel
    raise MachineError("timing steps", "this is a stand-in", "a machine")
