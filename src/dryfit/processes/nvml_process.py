"""The process that queries NVML, so that a driver that hangs blocks nothing else.

``python -m dryfit.processes.nvml_process CONTROL_PID MARKER`` answers the questions of
:mod:`dryfit.processes.gpus` on its standard input, a socket, in order, until that is closed.
"""

import signal
import socket
import sys
from contextlib import closing

from dryfit.processes.gpus import NvmlAnswer, NvmlMonitor, NvmlQuestion
from dryfit.processes.process import die_with_parent


def answer(devices: NvmlMonitor, question: NvmlQuestion) -> NvmlAnswer:
    """Answer a question; the UUIDs and process ids in it are remembered."""
    if question.uuids:
        devices.set_uuids(question.uuids)
    for pid in question.own:
        devices.mark_own(pid)
    look = devices.look(question.device) if question.look else None
    return NvmlAnswer(look=look, xids=devices.xids(question.device))


def main(arguments: list[str]) -> None:
    """Entry point of the process."""
    control_pid, marker = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the control process's business
    die_with_parent(int(control_pid))
    with socket.socket(fileno=0) as connection, closing(NvmlMonitor(marker)) as devices:
        for line in connection.makefile("rb"):
            reply = answer(devices, NvmlQuestion.model_validate_json(line))
            connection.sendall(reply.model_dump_json().encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
