"""Attack studies at random, from a seed, and hold every command to the promises of the documentation.

    PYTHONPATH=src:tests/support python tests/support/attacker.py [--seconds 600] [--seed N] [--count N] [--kind KIND]

Each attack takes a copy of a finished or an interrupted study, does something hostile to its files, its surroundings or
its processes, and runs commands on it. Promised, whatever is done: a command ends within its limit, with an exit status
that is not a bug's and without a traceback; no secret of its environment is printed or written; nothing in the folder
is executed; and once what was broken is put back, the study ends with the values of an undisturbed one.

Exit status 0: every promise held; 1: one did not, and the seed that shows it is printed.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from attack import READERS, SECRET, Attack, Kind, Range, Report, prepare
from attacks_while_running import clock_set, covered, signals, taken_away
from hostile_writes import rehearsed_writes

_WRITERS = (("resume", "--quiet"), ("tune", "--quiet"))
_SETUPS = (
    "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    "os.close(0)",
    "os.close(1)",
    "os.close(2)",
    "os.closerange(0, 3)",
    "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
    "resource.setrlimit(resource.RLIMIT_NOFILE, (14, 14))",
    "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))",
    "resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20))",
    "resource.setrlimit(resource.RLIMIT_DATA, (120 << 20, 120 << 20))",
    "resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))",
    "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))",
    "os.umask(0o777)",
    "os.nice(19)",
    "os.environ.clear()",
    "os.environ.update(LANG='C', LC_ALL='C', PYTHONIOENCODING='ascii')",
    "os.environ.update(TMPDIR='/nowhere', HOME='/nowhere', XDG_CACHE_HOME='relative')",
    "os.environ.update(COLUMNS='0', LINES='-1', TERM='nonsense')",
)
_POWERLESS = "import ctypes; [ctypes.CDLL(None).prctl(24, power, 0, 0, 0) for power in (1, 2, 3)]"
"""Root without the capabilities to pass over permissions; other users have none of them."""
_HOSTILE_TOML = (
    "[]",
    "{}",
    "-1",
    "1e308",
    "nan",
    "true",
    '""',
    '"\\u001b[31m"',
    "9" * 400,
    "[" * 300 + "]" * 300,
    '"../../../etc/passwd"',
    '"postgresql://user:hunter2hunter2@host/db"',
)


def wrong_kind(attack: Attack) -> str:
    """Something else stands where a file or folder belongs."""
    path = attack.draw.choice(attack.paths())
    aside = attack.study.with_name("aside")
    had = path.exists()
    if had:
        path.rename(aside)
    kinds: dict[str, Callable[[], object]] = {
        "folder": path.mkdir,
        "FIFO": lambda: os.mkfifo(path),
        "endless device": lambda: path.symlink_to("/dev/zero"),
        "dangling link": lambda: path.symlink_to(attack.study / "nowhere"),
        "link to a file": lambda: path.symlink_to(canary),
        "empty file": path.touch,
        "loop": lambda: path.symlink_to(path),
    }
    canary = attack.study.with_name("canary")
    canary.write_text("as it was", encoding="utf-8")
    kind = attack.draw.choice(sorted(kinds))
    kinds[kind]()
    attack.reads()
    attack.run(*attack.draw.choice(_WRITERS))
    if canary.read_text(encoding="utf-8") != "as it was":
        attack.broken("it wrote through a link")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    if had and path.parent.is_dir():  # else the study has moved on from there
        aside.rename(path)
    attack.goes_on()
    return f"{kind} at {path.relative_to(attack.study)}"


def changed_ledger(attack: Attack) -> str:
    """Lines of the ledger are valid one by one, or not even that."""
    draw, ledger = attack.draw, attack.study / "ledger.jsonl"
    whole = ledger.read_bytes()
    lines = whole.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    ways = {
        "doubled": lambda: [*lines[: at + 1], lines[at], *lines[at + 1 :]],
        "dropped": lambda: lines[:at] + lines[at + 1 :],
        "shuffled": lambda: draw.sample(lines, len(lines)),
        "deep": lambda: [*lines[:at], b"[" * 100_000 + b"]" * 100_000 + b"\n", *lines[at:]],
        "long number": lambda: [*lines[:at], b'{"v":1,"seq":' + b"9" * 5_000 + b"}\n", *lines[at:]],
        "other numbers": lambda: [*lines[:at], lines[at].replace(b'":0', b'":-7'), *lines[at + 1 :]],
        "a flipped byte": lambda: [
            whole[: (n := draw.randrange(len(whole)))],
            bytes([whole[n] ^ 0x15]),
            whole[n + 1 :],
        ],
        "cut": lambda: [whole[: draw.randrange(len(whole))]],
        "no UTF-8": lambda: [*lines[:at], b'{"v":1,"type":"\xff\xfe"}\n', *lines[at:]],
    }
    way = draw.choice(sorted(ways))
    changed = ways[way]()
    if draw.random() < 0.5 and way in ("doubled", "dropped", "shuffled"):
        changed = [
            json.dumps({**json.loads(line), "seq": index}).encode() + b"\n" for index, line in enumerate(changed)
        ]
        way += ", numbered anew"
    ledger.write_bytes(b"".join(changed))
    attack.reads()
    attack.run("tune", "--quiet")
    ledger.write_bytes(whole)
    attack.goes_on()
    return f"ledger {way} at line {at + 1}"


def permissions(attack: Attack) -> str:
    """Files and folders that a command may not read, not write, or not enter."""
    taken: dict[Path, int] = {}
    for path in attack.draw.sample(
        paths := [attack.study, *attack.paths()], min(len(paths), attack.draw.randint(1, 4))
    ):
        if path.exists() and not path.is_symlink():
            taken[path] = path.stat().st_mode
    mode = attack.draw.choice((0o000, 0o222, 0o444, 0o555))
    for path in taken:
        path.chmod(mode)
    attack.reads(setup=_POWERLESS)
    attack.run(*attack.draw.choice(_WRITERS), setup=_POWERLESS)
    for path, before in taken.items():
        path.chmod(before)
    attack.goes_on()
    return f"{mode:03o} for {', '.join(str(path.relative_to(attack.study)) for path in taken)}"


def surroundings(attack: Attack) -> str:
    """A careless parent: masks, limits, closed streams, odd variables."""
    setup = "; ".join(attack.draw.sample(_SETUPS, attack.draw.randint(1, 2)))
    for words in (attack.draw.choice(READERS), attack.draw.choice(_WRITERS)):
        attack.run(*words, setup=setup)
    for path in (attack.study, *attack.study.rglob("*")):  # a umask may have taken every permission
        if not path.is_symlink():
            path.chmod(0o755)
    attack.goes_on()
    return setup


def changed_study_file(attack: Attack) -> str:
    """A value of the study file is something else."""
    file = attack.study / "study.toml"
    whole = file.read_text(encoding="utf-8")
    lines = whole.splitlines()
    keys = [index for index, line in enumerate(lines) if "=" in line]
    at = attack.draw.choice(keys)
    value = attack.draw.choice(_HOSTILE_TOML)
    name = lines[at].partition("=")[0].strip()
    lines[at] = f"{name} = {value}"
    file.write_text("\n".join(lines), encoding="utf-8")
    attack.reads(1)
    before = (attack.study / "ledger.jsonl").read_bytes()
    attack.run("tune", "--quiet")
    after = (attack.study / "ledger.jsonl").read_bytes()
    if not after.startswith(before):
        attack.broken("the ledger has lost lines")
    if b"hunter2hunter2" in after:
        attack.broken("a password was written to the ledger")
    file.write_text(whole, encoding="utf-8")
    if after == before:
        attack.goes_on()
    return f"{name} = {value[:40]}"


RUNNING: tuple[Kind, ...] = (signals, taken_away, covered, clock_set)
"""Attacks on a study that has something left to run."""
ATTACKS: tuple[Kind, ...] = (
    wrong_kind,
    changed_ledger,
    permissions,
    surroundings,
    changed_study_file,
    rehearsed_writes,
    *RUNNING,
)


def attack_once(seed: int, grounds: Range, folder: Path, kinds: Sequence[Kind] = ATTACKS) -> Report:
    """Make the attack of a seed."""
    draw = random.Random(seed)
    kind = draw.choice(kinds)
    study = folder / "study"
    ground = grounds.interrupted if kind in RUNNING else draw.choice((grounds.finished, grounds.interrupted))
    shutil.copytree(ground, study, symlinks=True, ignore=_no_fifo)
    attack = Attack(draw, study, grounds, Report(kind.__name__))
    attack.report.name = f"{kind.__name__}: {kind(attack)}"
    for path in study.rglob("*"):
        if path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes():
            attack.broken(f"a secret was written to {path.relative_to(study)}")
    return attack.report


def _no_fifo(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_fifo()]


def main() -> int:
    """Attack until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--count", type=int, default=10**9, help="at most so many attacks")
    parser.add_argument("--kind", choices=[kind.__name__ for kind in ATTACKS], help="only attacks of this kind")
    given = parser.parse_args()
    kinds = [kind for kind in ATTACKS if given.kind in (None, kind.__name__)]
    counts: Counter[str] = Counter()
    broken: list[str] = []
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        grounds = prepare(Path(folder))
        deadline_s = time.monotonic() + given.seconds
        for seed in range(given.seed, given.seed + given.count):
            if time.monotonic() > deadline_s:
                break
            place = Path(folder) / f"attack-{seed}"
            place.mkdir()
            report = attack_once(seed, grounds, place, kinds)
            counts["attacks"] += 1
            counts["commands"] += report.commands
            if report.broken:
                broken.append(f"--seed {seed} --count 1: {report.name}")
                print(f"BROKEN {broken[-1]}", *report.broken, sep="\n  ", flush=True)
            shutil.rmtree(place, ignore_errors=True)
    print(f"{counts['attacks']} attacks, {counts['commands']} commands; {len(broken)} broke a promise")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
