"""Rehearse a user's script: ``python -m dryfit.gpu REQUEST.json``, in a fresh process that sees no GPU.

``--stem FD PARENT`` imports what all rehearsals need, and forks for each request whose file is named on a socket.

This process keeps the one that runs the script: behind a wall, so that nothing of the user's is written. What the
script's process says is completed here, from outside, by what it has written.
"""

import os
import shutil
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

from dryfit.gpu.written import SAVES_FILE, Saved, written
from dryfit.processes.process import ask_no_one, die_with_parent
from dryfit.processes.wall import Places, caches
from dryfit.processes.wall_keeper import end_as, run_walled
from dryfit.settings.choices import Wall
from dryfit.settings.errors import DryfitError, TraceError
from dryfit.settings.files import read_model, write_model
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer, RehearsalRequest, ScriptEnd

_ANSWER: Final = "answer.json"
_STEM: Final = "--stem"
_CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
_OPTIMIZERS_NEED: Final = "dryfit.gpu.private_apis.torch_optimizers"
_SESSION: Final = "dryfit.gpu.session"


def main() -> None:
    """Read the request, run its script, write the answer; or do so for one request after the other."""
    if sys.argv[1] == _STEM:
        _serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
    _rehearse(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)


def _serve(asked: socket.socket, parent_pid: int) -> NoReturn:
    """Fork for each request, one after the other, and tell how each ended: its wait status."""
    die_with_parent(parent_pid)
    own_pid, is_ready = os.getpid(), _import_ahead()
    with asked.makefile("r", encoding="utf-8") as requests:
        for request in requests:
            child = os.fork()
            if child == 0:
                asked.close()
                file = request.rstrip("\n")
                try:
                    if not is_ready:  # a second import might fail in another way than the first
                        again = [*sys.orig_argv[: -len(sys.argv) + 1], file, str(own_pid)]
                        os.execv(sys.executable, again)
                    sys.argv[1:] = [file]
                    _rehearse(Path(file), own_pid)
                finally:
                    traceback.print_exc()  # nobody else does
                    os._exit(1)
            asked.sendall(str(os.waitpid(child, 0)[1]).encode())
    os._exit(0)


def _import_ahead() -> bool:
    """Import what all rehearsals import; return whether that went well. No wall is here, so nothing is written."""
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = os.sep  # an import makes this folder
    try:
        for name in (_SESSION, _OPTIMIZERS_NEED):
            import_module(name)
    except Exception:  # noqa: BLE001  # a broken torch: each rehearsal says so
        return False
    finally:
        sys.dont_write_bytecode = writes
        del os.environ[_CACHE_VARIABLE]
        if before is not None:
            os.environ[_CACHE_VARIABLE] = before
    return True


def _rehearse(file: Path, parent_pid: int | None) -> NoReturn:
    """Run the script of a request, and write the answer.

    Args:
        parent_pid: The process that this one ends with; None: the one that the request names.
    """
    request = RehearsalRequest.model_validate_json(file.read_text(encoding="utf-8"))
    if (parent_pid := parent_pid or request.parent_pid) is not None:
        die_with_parent(parent_pid)
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
            for name in request.views:
                with suppress(FileNotFoundError):
                    shutil.move(places.own / name, Path(request.answer_file).with_name(name))
            muted = {"muted": (*answer.muted, *files)}
            others = tuple(one.model_copy(update=muted) for one in answer.others)
            write_model(Path(request.answer_file), answer.model_copy(update={**muted, "others": others}))
    end_as(status)


def _inside(request: RehearsalRequest, places: Places, wall: Wall, kept: Sequence[Path]) -> NoReturn:
    """Run the script: behind the wall."""
    own = places.enter(wall)
    file = own / _ANSWER

    def finish(answer: RehearsalAnswer) -> None:
        if _SESSION not in sys.modules:  # torch is in no state to be asked
            write_model(file, answer)
            os._exit(0)
        sys.modules[_SESSION].end_with(answer, file)

    try:
        _demand_torch()
        session = import_module(_SESSION)
        session.rehearse(request, finish, session.Behind(wall, places, tuple(kept), own))
    except DryfitError as error:
        finish(
            RehearsalAnswer(
                verdict=VerdictKind.UNKNOWN, end=ScriptEnd.FAILED, device=request.device, reasons=(str(error),)
            )
        )
    except BaseException:
        traceback.print_exc()  # how this process ends tells nothing: nobody else prints it
        raise
    os._exit(1)


def _demand_torch() -> None:
    """Import torch, which takes seconds, in this process alone.

    Raises:
        TraceError: That fails, or it sees a device though none is to be seen.
    """
    doing = "importing torch to rehearse with it"
    try:
        torch = import_module("torch")
    except Exception as error:  # a broken installation may raise anything
        said = str(error).strip().partition("\n")[0]
        found = f"{sys.executable}: {type(error).__name__}: {said}"
        raise TraceError(doing, found, hint=f"see: {sys.executable} -c 'import torch'") from error
    if torch.cuda.is_available():
        found = f"torch {torch.__version__} of {sys.executable} sees a GPU, though CUDA_VISIBLE_DEVICES hides all"
        raise TraceError(doing, found, "a torch that sees none: a script would train on it")


if __name__ == "__main__":
    main()
