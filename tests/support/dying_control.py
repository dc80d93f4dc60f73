"""``dryfit`` that is killed at the next event of a kind: ``dying_control.py KIND WAY COMMAND...``."""

import os
import signal
import sys

from dryfit.cli.app import main
from dryfit.store.events import Event
from dryfit.store.ledger import Ledger
from kill_points import Way


def arrange(kind: str, way: Way) -> None:
    """Let this process kill itself, as nobody can see coming, next to the first event of a kind."""
    append = Ledger.append

    def deadly(self: Ledger, event: Event) -> Event:
        if event.type != kind:
            return append(self, event)
        if way is Way.MIDWAY:
            line = event.model_dump_json().encode()
            os.pwrite(self._fd, line[: len(line) // 2], self.size_bytes)
        elif way is Way.AFTER:
            append(self, event)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    Ledger.append = deadly


if __name__ == "__main__":
    arrange(sys.argv[1], Way(sys.argv[2]))
    sys.argv[1:] = sys.argv[3:]
    main()
