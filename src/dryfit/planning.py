"""Child job PLAN: the memory of trials on a device, before anything runs on it."""

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import InternalError
from dryfit.core.wire import ChildResult, PlanRequest


def plan(body: PlanRequest, channel: ChildChannel) -> ChildResult:
    """Plan every subject of a request."""
    raise InternalError("planning", "not built yet")
