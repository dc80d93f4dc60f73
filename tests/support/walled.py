"""Run code in processes behind each wall of a rehearsal: nothing real is written, whatever it does."""

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import thinning
from dryfit.processes import linux_kernel
from dryfit.processes.wall_keeper import wall_here
from dryfit.settings.choices import Wall
from dryfit.settings.rehearsal_messages import Muted


def is_here(wall: Wall) -> bool:
    """Whether this machine has a wall."""
    if wall is Wall.LANDLOCK:
        return linux_kernel.version() > 0
    return wall is Wall.REDIRECT or wall_here() is Wall.NAMESPACES


WALLS = tuple(filter(is_here, (Wall.NAMESPACES, Wall.LANDLOCK)))
"""Those of this machine that keep every promise."""
DAILY = WALLS if thinning.FULL_VARIABLE in os.environ else WALLS[-1:]
"""Where what is tested has little to do with the wall."""
Told = dict[tuple[Wall, str], list[Muted]]
"""What is told of each case behind each wall."""

_HEAD = """
import json, os, sys, traceback
from pathlib import Path
import torch
from dryfit.processes.wall_keeper import run_walled
from dryfit.processes.wall import Places, Wall
from dryfit.gpu.private_apis.torch_fakes import FakeTensor, FakeTensorMode
from dryfit.gpu.muting import install
from dryfit.gpu.written import SAVES_FILE, Saved, written
fakes = FakeTensorMode(allow_non_fake_inputs=True)
def made(shape, dtype):
    with fakes: return torch.empty(shape, dtype=dtype)
"""
_EACH = """
OWN, failed = dict(globals()), 0

def walled(number, asked, name, code):
    places = Places(SCRATCH / str(number))

    def inside(wall):
        status = 1
        try:
            assert wall is asked, (wall, asked)
            names = dict(OWN, wall=wall, name=name, own=places.enter(wall))
            muting = names["muting"] = install(places, wall, made, KEPT)
            exec(compile(code, name, "exec"), names)
            status = 0
        except BaseException:
            print("FAILED", asked, name)
            traceback.print_exc(file=sys.stdout)
        finally:
            (places.own_behind(wall) / "muted.json").write_text(json.dumps([one.model_dump() for one in muting.muted]))
            muting.close()
            sys.stdout.flush()
            os._exit(status)

    with places.made():
        status = run_walled(places, inside, KEPT, asked)
        apart = (f"{places.folder.resolve()}/", f"{places.temporary.resolve()}/", "/dev/shm/")
        files = written(places.files, Saved.read(places.own / SAVES_FILE), apart)
        if not (places.own / "muted.json").exists():
            print("ENDED", asked, name, "with wait status", status)
            return True
        told = json.loads((places.own / "muted.json").read_text()) + [one.model_dump() for one in files]
    print("TOLD", json.dumps([asked, name, told]), flush=True)
    return status != 0

for asked in map(Wall, WALLS):
    for number, (name, code) in enumerate(CASES.items()):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            status = 1
            try:
                status = int(walled(number, asked, name, code))
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            finally:
                sys.stdout.flush()
                os._exit(status)
        failed += os.waitpid(child, 0)[1] != 0
assert not failed
"""


def run_each(
    head: str,
    cases: Mapping[str, str],
    scratch: Path,
    cwd: Path,
    *,
    walls: Iterable[Wall] = WALLS,
    kept: Iterable[Path] = (),
    **environment: str,
) -> Told:
    """Run each code behind each wall in a process of its own, forked after what the head imports.

    It finds ``muting``, ``wall`` and ``own``, where it may write as it is. Returns what is told of each.

    Raises:
        AssertionError: One failed; what it said.
    """
    walls = [wall for wall in walls if wall in (*WALLS, Wall.REDIRECT)]
    given = f"CASES = {dict(cases)!r}\nWALLS = {[str(wall) for wall in walls]!r}\nSCRATCH = Path({str(scratch)!r})\n"
    given += f"KEPT = [Path(one) for one in {list(map(str, kept))!r}]\n"
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore", **environment}
    command = [sys.executable, "-c", f"{_HEAD}{head}\n{given}{_EACH}"]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    return {(Wall(wall), name): [Muted.model_validate(one) for one in told] for wall, name, told in lines}


def tree(folder: Path) -> dict[str, str]:
    """Return what is in a folder: content, kind, mode, owner, time and extended attributes of each path."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        facts = path.lstat()
        content = b""
        if stat.S_ISLNK(facts.st_mode):
            content = os.readlink(path).encode()
        elif stat.S_ISREG(facts.st_mode):
            content = path.read_bytes()
        attributes: dict[str, bytes] = {}
        with suppress(OSError):
            attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path)}
        of_file = (facts.st_mtime_ns, facts.st_nlink, facts.st_ino)
        kind = (oct(facts.st_mode), facts.st_uid, facts.st_gid, of_file, sorted(attributes.items()))
        found[str(path.relative_to(folder))] = f"{hashlib.sha256(content).hexdigest()} {kind}"
    return found
