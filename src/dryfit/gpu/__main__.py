"""Rehearse a user's script: ``python -m dryfit.gpu REQUEST.json``, in a fresh process that sees no GPU.

This process keeps the one that runs the script: behind a wall, so that nothing of the user's is written. What the
script's process says is completed here, from outside, by what it has written.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

from dryfit.gpu.written import SAVES_FILE, Saved, written
from dryfit.processes.process import ask_no_one, die_with_parent
from dryfit.processes.wall import Places, caches
from dryfit.processes.wall_keeper import end_as, run_walled
from dryfit.settings.choices import Wall
from dryfit.settings.errors import DryfitError
from dryfit.settings.memory_plan import VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer, RehearsalRequest, ScriptEnd
from dryfit.settings.wire import read_model, write_model

_ANSWER: Final = "answer.json"


def main() -> None:
    """Read the request, run its script, write the answer."""
    request = RehearsalRequest.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if request.parent_pid is not None:
        die_with_parent(request.parent_pid)
    ask_no_one()
    places = Places(Path(request.scratch_dir).absolute())
    kept: Sequence[Path] = ()
    if request.keep_caches:
        script = [Path(request.script).absolute().parent] if request.script else []
        kept = caches(os.environ, [Path.cwd(), Path.home(), *script])
    with places.made():
        status = run_walled(places, lambda wall: _inside(request, places, wall, kept), kept, request.wall)
        answer = read_model(places.own / _ANSWER, RehearsalAnswer)
        if answer is not None:
            apart = (f"{places.folder.resolve()}/", f"{places.temporary.resolve()}/", "/dev/shm/")
            files = written(places.files, Saved.read(places.own / SAVES_FILE), apart)
            write_model(Path(request.answer_file), answer.model_copy(update={"muted": (*answer.muted, *files)}))
    end_as(status)


def _inside(request: RehearsalRequest, places: Places, wall: Wall, kept: Sequence[Path]) -> NoReturn:
    """Run the script: behind the wall."""
    file = places.enter(wall) / _ANSWER
    try:
        session = import_module("dryfit.gpu.session")  # torch, which takes seconds, in this process alone
    except BaseException:
        traceback.print_exc()  # how this process ends tells nothing: nobody else prints it
        raise

    def finish(answer: RehearsalAnswer) -> None:
        session.end_with(answer, file)

    try:
        session.rehearse(request, finish, session.Behind(wall, places, tuple(kept)))
    except DryfitError as error:
        finish(
            RehearsalAnswer(
                verdict=VerdictKind.UNKNOWN, end=ScriptEnd.FAILED, device=request.device, reasons=(str(error),)
            )
        )
    os._exit(1)


if __name__ == "__main__":
    main()
