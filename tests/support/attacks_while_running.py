"""Attacks on a study while it runs: signals, files taken away, mounts laid over it, a clock that is set."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from attack import LIMIT_S, STATUSES, Attack, argv, environment


def signals(attack: Attack) -> str:
    """Signals at random times, to the command or to everything it started."""
    sent: list[str] = []
    for _ in range(attack.draw.randint(1, 4)):
        process = subprocess.Popen(
            argv("tune", attack.study, "--quiet"),
            env={**environment(), "STEP_PAUSE_S": "0.02"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        numbers = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        natural = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT, -signal.SIGUSR2}
        for number in attack.draw.sample(numbers, attack.draw.randint(1, 3)):
            time.sleep(attack.draw.random() * 1.5)
            sent.append(number.name)
            if process.poll() is None:
                if not _catches(process.pid, number):
                    natural.add(-number)
                process.send_signal(number)
        try:
            _, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            attack.broken(f"{sent}: tune hangs")
            process.kill()
            process.communicate()
            continue
        if process.returncode not in natural and process.returncode not in STATUSES:
            attack.broken(f"{sent}: exit status {process.returncode}: {errors[-600:]!r}")
    attack.goes_on()
    return " ".join(sent)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal by now; one that has just begun has none, and ends by it."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def taken_away(attack: Attack) -> str:
    """A file or folder of a running study is deleted, moved, replaced or changed."""
    study, draw = attack.study, attack.draw
    ledger, moved = study / "ledger.jsonl", study.with_name("moved")
    ways: dict[str, Callable[[], object]] = {
        "ledger deleted": ledger.unlink,
        "ledger renamed": lambda: ledger.rename(study / "elsewhere"),
        "ledger replaced": lambda: (shutil.copy(ledger, study / "copy"), (study / "copy").replace(ledger)),
        "ledger cut": lambda: os.truncate(ledger, draw.randrange(ledger.stat().st_size)),
        "ledger appended to": lambda: ledger.open("ab").write(b"{}\n"),
        "an older ledger": lambda: ledger.write_bytes(older),
        "ledger a FIFO": lambda: (ledger.unlink(), os.mkfifo(ledger)),
        "lock deleted": (study / "lock").unlink,
        "folder moved": lambda: study.rename(moved),
        "logs deleted": lambda: shutil.rmtree(study / "logs"),
        "doorbell deleted": (study / "doorbell").unlink,
        "trials deleted": lambda: shutil.rmtree(study / "trials"),
        "a stop that is a folder": (study / "stop").mkdir,
    }
    older = ledger.read_bytes()
    way = draw.choice(sorted(ways))
    process = _running(attack)
    time.sleep(draw.random())
    before = ledger.read_bytes()
    try:
        ways[way]()
    except OSError as error:  # it had ended, or removed the file itself
        way += f" ({error.strerror})"
    _ended(attack, process, way)
    if moved.exists():
        moved.rename(study)
    if (study / "stop").is_dir():
        (study / "stop").rmdir()
    _put_back(study, before)
    attack.goes_on()
    return way


def _put_back(study: Path, backup: bytes) -> None:
    """Do what the messages say: the ledger that was kept, or a backup with the last lines that were kept."""
    ledger = study / "ledger.jsonl"
    for kept in study.glob("ledger-kept-*.jsonl"):
        if ledger.is_fifo():
            ledger.unlink()
        kept.replace(ledger)
    for recent in study.glob("ledger-recent-*.jsonl"):
        lines = {json.loads(line)["seq"]: line for line in (*backup.splitlines(), *recent.read_bytes().splitlines())}
        ledger.write_bytes(b"".join(lines[seq] + b"\n" for seq in sorted(lines)))
        recent.unlink()


def covered(attack: Attack) -> str:
    """Another mount is laid over the folder of a running study: read-only, empty or full; it goes with the process."""
    ways = {
        "read-only": 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"',
        "empty": 'mount -t tmpfs none "$0"',
        "full": 'mount -t tmpfs -o size=4k none "$0"; head -c 1m /dev/zero > "$0/filler"; true',
        "trials, read-only": 'mount --bind "$0/trials" "$0/trials" && mount -o remount,bind,ro "$0/trials"',
    }
    way = attack.draw.choice(sorted(ways))
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        attack.run("status")
        return "no mounts are allowed here"
    process = _running(attack, "unshare", "-m")
    time.sleep(attack.draw.random())
    line = ["nsenter", "-t", str(process.pid), "-m", "sh", "-c", ways[way], attack.study]
    subprocess.run(line, capture_output=True, check=False)
    _ended(attack, process, way)
    attack.goes_on()
    return way


_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, found);
    if (clock != CLOCK_REALTIME) return status;
    int file = open(getenv("CLOCK_FILE") ? getenv("CLOCK_FILE") : "", O_RDONLY | O_CLOEXEC);
    char text[32] = {0};
    if (file >= 0) {
        if (read(file, text, sizeof text - 1) > 0) found->tv_sec += atoll(text);
        close(file);
    }
    return status;
}
"""
"""A library that sets the clock of the processes that load it, and of nobody else, by what a file says."""


def clock_set(attack: Attack) -> str:
    """The clock of a running study is set, forwards and backwards."""
    with tempfile.TemporaryDirectory(prefix="clock-") as folder:
        library, jump = Path(folder) / "clock.so", Path(folder) / "jump"
        compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
        try:
            subprocess.run(compiler, input=_CLOCK.encode(), check=True)
        except (OSError, subprocess.CalledProcessError):
            attack.run("status")
            return "no compiler is here"
        jumps = [attack.draw.choice((-86_400, 86_400, -1_700_000_000, 2_000_000_000, -5, 60)) for _ in range(3)]
        process = _running(attack, LD_PRELOAD=str(library), CLOCK_FILE=str(jump))
        for seconds in jumps:
            jump.with_name("next").write_text(str(seconds), encoding="ascii")
            jump.with_name("next").replace(jump)
            time.sleep(attack.draw.random() / 2)
        _ended(attack, process, f"clock set by {jumps}", {0})
    attack.goes_on()
    return f"clock set by {jumps}"


def _running(attack: Attack, *before: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start to go on with a study, slowly, and wait until it has written something, or ended."""
    ledger = attack.study / "ledger.jsonl"
    size = ledger.stat().st_size
    process = subprocess.Popen(
        [*before, *argv("tune", attack.study, "--quiet")],
        env={**environment(), "STEP_PAUSE_S": "0.1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    attack.report.commands += 1
    deadline_s = time.monotonic() + LIMIT_S
    while ledger.stat().st_size == size and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return process


def _ended(attack: Attack, process: subprocess.Popen[bytes], what: str, allowed: set[int] | None = None) -> None:
    """Wait for a study's end, and hold it to the promises of every command."""
    try:
        printed, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        attack.broken(f"{what}: tune hangs")
        process.kill()
        process.communicate()
        return
    attack.holds(f"tune, {what}", process.returncode, printed)
    if allowed is not None and process.returncode not in allowed:
        attack.broken(f"{what}: exit status {process.returncode}: {attack.printed[-600:]}")
