"""The host's memory: what is left for more trials."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from dryfit.processes import node as host
from dryfit.processes.node import HostMemory, read_host_memory


def test_what_is_promised_is_not_given_twice() -> None:
    look = HostMemory(total_bytes=1000, free_bytes=700, rss_bytes={1: 150, 2: 400})
    assert look.available_bytes({}) == 600, "a tenth stays free"
    assert look.available_bytes({1: 250}) == 500
    assert look.available_bytes({1: 250, 2: 300}) == 500, "one that takes more than expected gives nothing back"
    assert look.available_bytes({1: 250, -5: 600}) == 0


def test_this_machine() -> None:
    look = read_host_memory([os.getpid(), 2**22 + 1])
    assert 0 < look.free_bytes < look.total_bytes
    assert set(look.rss_bytes) == {os.getpid()}


def test_the_control_group_bounds_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_host_memory([os.getpid()])
    limit = whole.rss_bytes[os.getpid()] + (64 << 20)
    monkeypatch.setattr(host, "memory_limit_bytes", lambda: limit)
    look = read_host_memory([os.getpid()])
    assert look.total_bytes == limit and look.free_bytes < limit


_SESSION = """
import os, sys, time
held = bytearray(os.urandom(1)) * (40 << 20)
read, write = os.pipe()
if os.fork() == 0:
    own = bytearray(os.urandom(1)) * (90 << 20)
    os.write(write, b"1")
    time.sleep(120)
os.read(read, 1)
print("ready", flush=True)
time.sleep(120)
"""


def test_all_processes_of_a_childs_session_count_without_what_they_share() -> None:
    """A rank is a fork: what it has for itself is counted, what the first one had before is not counted twice."""
    command = [sys.executable, "-c", _SESSION]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            alone = psutil.Process(child.pid).memory_info().rss
            found = read_host_memory([child.pid, os.getpid()]).rss_bytes
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    assert alone > 40 << 20
    assert alone + (90 << 20) <= found[child.pid] < alone + (120 << 20)
    assert read_host_memory([child.pid]).rss_bytes == {}, "it is gone"
