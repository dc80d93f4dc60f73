"""Groups of real ranks: processes with gloo, forked from this one, which has imported everything and has no group."""

import datetime
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dryfit.parallel.collectives import ProcessRanks
from dryfit.processes.process import die_with_parent

Facts = dict[str, Any]
Case = Callable[[ProcessRanks], Facts]
ERROR = "error"
"""In the place of what a rank found: what it raised."""

_LONGEST_CALL = datetime.timedelta(seconds=300)
_TO_SAY_S = 5.0
_POLL_S = 0.01


def run(degree: int, folder: Path, cases: Mapping[str, Case]) -> dict[str, list[Facts]]:
    """Run cases one after another on one group of processes; a case that raises costs those after it a new group.

    Args:
        degree: How many processes.
        folder: Made here; for what they write.
        cases: By name; what each process does, with its end of the collectives, and what it found, fit for JSON.

    Returns:
        For each case what each rank found, or what it raised under :data:`ERROR`.
    """
    assert not dist.is_initialized()  # a fork would have it too
    found: dict[str, list[Facts]] = {}
    while left := {name: case for name, case in cases.items() if name not in found}:
        place = folder / f"from-{len(found)}"
        place.mkdir(parents=True)
        ends = _run_group(degree, place, left)
        for name in left:
            said = [_read(place, name, rank) for rank in range(degree)]
            done = all(one is not None and ERROR not in one for one in said)
            found[name] = [one or {ERROR: f"it said nothing; the ranks ended with {ends}"} for one in said]
            if not done:
                break
    return found


def _run_group(degree: int, place: Path, cases: Mapping[str, Case]) -> list[int]:
    """Fork ranks and wait for them; once one has failed, the others are killed soon. How each has ended."""
    parent_pid, running, ends = os.getpid(), dict[int, int](), [0] * degree
    for rank in range(degree):
        pid = os.fork()
        if not pid:
            _be_a_rank(parent_pid, rank, degree, place, cases)
        running[pid] = rank
    deadline_s = float("inf")
    while running:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ends[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        if any(ends):
            deadline_s = min(deadline_s, time.monotonic() + _TO_SAY_S)
        if time.monotonic() > deadline_s:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return ends


def _be_a_rank(parent_pid: int, rank: int, degree: int, place: Path, cases: Mapping[str, Case]) -> None:
    name, status = next(iter(cases)), 1
    try:
        die_with_parent(parent_pid)
        torch.set_num_threads(1)
        store = dist.FileStore(str(place / "store"), degree)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=degree, timeout=_LONGEST_CALL)
        ranks = ProcessRanks()
        for name, case in cases.items():
            found = case(ranks)
            _path(place, name, rank).write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        _path(place, name, rank).write_text(json.dumps({ERROR: traceback.format_exc()}), encoding="utf-8")
    finally:
        os._exit(status)


def _path(place: Path, name: str, rank: int) -> Path:
    return place / f"{name}-{rank}.json"


def _read(place: Path, name: str, rank: int) -> Facts | None:
    path = _path(place, name, rank)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
