"""Functions that break the process they run in, each in one way, for as many attempts as they are told to. No torch."""

import ctypes
import errno
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import shared_memory
from pathlib import Path

import dryfit

MIB = 2**20
ALWAYS = 99
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def _ends_by(number: signal.Signals) -> Callable[[dryfit.Trial], None]:
    return lambda _: os.kill(os.getpid(), number)


def _host_memory(_trial: dryfit.Trial) -> None:
    """Ask for more than the process may have."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * mmap.PAGESIZE + 256 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, resource.RLIM_INFINITY))
    bytearray(2**30)


def _takes_memory(_trial: dryfit.Trial) -> None:
    """Take memory, page by page, until somebody ends this."""
    taken = []
    while True:
        taken.append(b"x" * (16 * MIB))


def _half_a_checkpoint(trial: dryfit.Trial) -> None:
    """Die while the second checkpoint is half written; the first one is whole."""
    trial.report(1.0, 1)
    (trial.checkpoint_dir / "state.json").write_text(json.dumps({"step": 1}))
    trial.checkpointed(1)
    (trial.checkpoint_dir / "state.tmp").write_text('{"st')
    os.kill(os.getpid(), signal.SIGKILL)


def _full_disk(_trial: dryfit.Trial) -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def _over_quota(_trial: dryfit.Trial) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "state.json")


def _fills_its_disk(trial: dryfit.Trial) -> None:
    """Write checkpoints until the disk has no room left, and say nothing of it."""
    with (trial.checkpoint_dir / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    # Whoever writes next, this process or the control process, meets the full disk.
    for step in range(1, 1000):
        trial.report(1.0, step)


def _full_shared_memory(_trial: dryfit.Trial) -> None:
    """Write more shared memory than there is; the kernel gives it out unseen, and ends who touches it."""
    block = shared_memory.SharedMemory(create=True, size=8 * MIB)
    try:
        block.buf[:] = b"x" * len(block.buf)
    finally:
        block.unlink()


def _stuck_in_native_code(_trial: dryfit.Trial) -> None:
    """Sleep with the interpreter's lock held: no other thread gives signs of life then."""
    while True:
        ctypes.PyDLL(None).sleep(600)  # the question for its stacks ends one sleep


def _talks(trial: dryfit.Trial) -> None:
    """Print ``TALK_MIB``; go on each time that the disk has been given back what was printed before."""
    log = Path("/proc/self/fd/1").resolve()
    block = b"x" * 63 + b"\n"
    for _ in range(int(os.environ["TALK_MIB"]) // 16):
        os.write(1, block * (16 * MIB // len(block)))
        deadline_s = time.monotonic() + 60
        while log.stat().st_blocks * 512 > 20 * MIB:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{log} takes {log.stat().st_blocks * 512} bytes")
            time.sleep(0.01)
    print("the last line")


def _has_a_family(_trial: dryfit.Trial) -> None:
    """Leave processes behind: one in this process group, one in a group of its own, one in a session of its own."""
    family = [
        subprocess.Popen(SLEEP, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)
        for how in ({}, {"process_group": 0}, {"start_new_session": True})
    ]
    Path(os.environ["FAMILY_FILE"]).write_text(json.dumps([one.pid for one in family]))


FAULTS: Mapping[str, Callable[[dryfit.Trial], None]] = {
    "SIGKILL": _ends_by(signal.SIGKILL),
    "SIGTERM": lambda trial: os.kill(os.getpid(), signal.SIGTERM) or _until_asked(trial),
    "stopped": _ends_by(signal.SIGSTOP),
    "SIGSEGV": lambda _: print(ctypes.string_at(0)),
    "SIGABRT": lambda _: os.abort(),
    "left": lambda _: os._exit(0),
    "sys.exit": lambda _: sys.exit(0),
    "half a checkpoint": _half_a_checkpoint,
    "host memory": _host_memory,
    "takes memory": _takes_memory,
    "full disk": _full_disk,
    "over quota": _over_quota,
    "fills its disk": _fills_its_disk,
    "full shared memory": _full_shared_memory,
    "stuck": _stuck_in_native_code,
    "talks": _talks,
    "has a family": _has_a_family,
}


def _until_asked(trial: dryfit.Trial) -> None:
    """Go on until a stop is asked for, as a polite function does."""
    trial.report(1.0, 1)
    while not trial.should_stop:
        time.sleep(0.01)


def breaks(trial: dryfit.Trial) -> float | None:
    """Break as the parameters say, ``times`` attempts long; then give the trial's value."""
    if trial.attempt <= int(trial.params["times"]):
        FAULTS[str(trial.params["fault"])](trial)
        if trial.should_stop:
            return None
    state = trial.checkpoint_dir / "state.json"
    began_at = json.loads(state.read_text())["step"] if state.exists() else 0
    return began_at + 0.5


def _raised(kind: str, text: str) -> BaseException:
    """An exception of torch by its name; a plain RuntimeError where this build does not have it."""
    import torch

    return getattr(torch, kind, RuntimeError)(text)


_ASSERT = """CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 1.21 GiB is free."
    " Including non-PyTorch memory, this process has 22.43 GiB memory in use. Of the allocated memory 21.80 GiB is"
    " allocated by PyTorch, and 178.22 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory"
    " is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
_NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with"
    " NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed."
)
# What libraries raise on a machine with a GPU, in their own words and types.
TOLD: Mapping[str, Callable[[], BaseException]] = {
    "out of memory": lambda: _raised("OutOfMemoryError", _OOM),
    "out of memory, outside of the allocator": lambda: _raised("AcceleratorError", "CUDA error: out of memory"),
    "cublas has no memory": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "device-side assert": lambda: _raised("AcceleratorError", _ASSERT),
    "illegal access": lambda: _raised("AcceleratorError", "CUDA error: an illegal memory access was encountered"),
    "ECC": lambda: _raised("AcceleratorError", "CUDA error: uncorrectable ECC error encountered"),
    "fallen off the bus": lambda: _raised("AcceleratorError", "CUDA error: unspecified launch failure"),
    "NCCL": lambda: _of_torch_distributed("DistBackendError", _NCCL),
    "meta": lambda: NotImplementedError("Cannot copy out of meta tensor; no data!"),
}


def _of_torch_distributed(kind: str, text: str) -> BaseException:
    import torch.distributed

    return getattr(torch.distributed, kind, RuntimeError)(text)


def told(trial: dryfit.Trial) -> float:
    """Raise what its parameter names, ``times`` attempts long."""
    if trial.attempt <= int(trial.params["times"]):
        raise TOLD[str(trial.params["error"])]()
    return 0.5
