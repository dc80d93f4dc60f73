"""Messages between the control process and its fork server: one JSON object a line over a socket pair."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from dryfit.core.wire import Wire

SERVE: Final = "--"
"""Among the modules of a fork server: here it makes the children that were asked for and whose job is imported.

All others are made once everything is imported, and share it.
"""


class ForkRequest(Wire):
    """Control to server: fork a child for the request in a folder."""

    # Pydantic keeps thousands of short strings that it has read: here no two are the same, and the server is to stay
    # as it is however many children it has made.
    model_config = ConfigDict(cache_strings="keys")

    key: str
    request_path: str
    entry: str


class Ready(Wire):
    """Everything is imported; forks follow."""

    type: Literal["ready"] = "ready"
    import_s: float


class Forked(Wire):
    """A child was made."""

    type: Literal["forked"] = "forked"
    key: str
    pid: int


class Refused(Wire):
    """A fork would not be safe (and will not become so), or failed (and may work later)."""

    type: Literal["refused"] = "refused"
    key: str
    why: str
    unsafe: bool


class Exited(Wire):
    """A child has ended and is reaped; what was left of its session is killed."""

    type: Literal["exited"] = "exited"
    key: str
    status: int


ServerMessage = Annotated[Ready | Forked | Refused | Exited, Field(discriminator="type")]
SERVER_MESSAGE: TypeAdapter[ServerMessage] = TypeAdapter(ServerMessage)


@dataclass(slots=True)
class LineBuffer:
    """Cuts a stream of bytes into lines."""

    rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the lines they complete, without their ends."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines
