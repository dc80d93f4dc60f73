"""Rehearse a user's script: ``python -m dryfit.virtual REQUEST.json``, in a fresh process that sees no GPU."""

import os
import sys
import threading
from pathlib import Path

from dryfit.core.errors import DryfitError
from dryfit.core.jobs.memory import VerdictKind
from dryfit.core.jobs.rehearsal import RehearsalAnswer, RehearsalRequest, ScriptEnd
from dryfit.core.process import ask_no_one, die_with_parent
from dryfit.core.wire import write_model
from dryfit.virtual.session import rehearse
from dryfit.virtual.writes.muting import unmuted


def main() -> None:
    """Read the request, run its script, write the answer."""
    request = RehearsalRequest.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if request.parent_pid is not None:
        die_with_parent(request.parent_pid)
    ask_no_one()
    one_answer = threading.Lock()

    def finish(answer: RehearsalAnswer) -> None:
        one_answer.acquire()  # for good
        with unmuted():
            write_model(Path(request.answer_file), answer)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what the script left (threads, workers, hooks of torch) must not decide how this ends

    try:
        rehearse(request, finish)
    except DryfitError as error:
        finish(
            RehearsalAnswer(
                verdict=VerdictKind.UNKNOWN, end=ScriptEnd.FAILED, device=request.device, reasons=(str(error),)
            )
        )


if __name__ == "__main__":
    main()
