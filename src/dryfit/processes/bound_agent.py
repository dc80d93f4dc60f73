"""An agent that ends with the thread that began it: ``python -m dryfit.processes.bound_agent FOLDER PARENT``.

Its children end with it. So an engine that kills what it has begun leaves nothing behind.
"""

import sys
from pathlib import Path

from dryfit.ledger.folder import StudyLayout
from dryfit.processes.agent import serve
from dryfit.processes.process import die_with_parent
from dryfit.settings.errors import DryfitError, ExitStatus

_WAIT_S = 600.0


def _note(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Run an agent of the study in a folder."""
    folder, parent = sys.argv[1:]
    die_with_parent(int(parent))
    try:
        _note(serve(StudyLayout(Path(folder)), None, None, _WAIT_S, _note))
    except DryfitError as error:
        _note(f"error: {error}")
        sys.exit(ExitStatus.CANNOT_RUN)


if __name__ == "__main__":
    main()
