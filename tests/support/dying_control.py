"""``dryfit`` that is killed at the next event of a kind: ``dying_control.py KIND WAY COMMAND...``."""

import os
import signal
import sys
from typing import NoReturn

from dryfit.documents.command_line import main
from dryfit.ledger.ledger import Ledger
from kill_points import Way, deadly


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)  # as nobody can see coming
    raise AssertionError("unreachable")


if __name__ == "__main__":
    kind, way = sys.argv[1], Way(sys.argv[2])
    Ledger.append = deadly(lambda _, event: event.type == kind, way, _die)
    sys.argv[1:] = sys.argv[3:]
    main()
