"""Says what a process is like: run as ``python -m warm_facts``, warm or from nothing."""

import faulthandler
import io
import json
import os
import signal
import sys
import warnings
from pathlib import Path


def facts() -> dict[str, object]:
    """Return what must be alike however this process was made."""
    descriptors = {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGPIPE)
    own_filters = 5 + len(sys.warnoptions)  # those of an interpreter, before which libraries put theirs
    return {
        "arguments": sys.argv[1:],
        "name": __name__,
        "command": [word for word in Path("/proc/self/cmdline").read_bytes().split(b"\0") if word].__repr__(),
        "born with": Path("/proc/self/environ").read_bytes().rstrip(b"\0").decode().split("\0"),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "leads": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "descriptors": sorted(descriptors),
        "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in numbers],
        "standard input": sys.stdin.read(),
        "unbuffered": [
            [one.name, one.write_through, isinstance(one.buffer, io.FileIO)] for one in (sys.stdout, sys.stderr)
        ],
        "tells of faults": faulthandler.is_enabled(),
        "warnings": [sys.warnoptions, *map(str, warnings.filters[-own_filters:])],
        "threads": len(os.listdir("/proc/self/task")),
        "torch": "torch" in sys.modules,
    }


if __name__ == "__main__":
    match sys.argv[1]:
        case "facts":
            print(json.dumps(facts()))
        case "fail":
            raise RuntimeError("on purpose")
        case "exit":
            sys.exit(sys.argv[2])
        case "status":
            sys.exit(int(sys.argv[2]))
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
