"""A copy of a process ends where the block ends in which it was made, and the process itself goes on."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from dryfit.processes.process import CopiesEndHere

try:
    with CopiesEndHere():
        copy = os.fork()
        if copy == 0:
            {does}
        _, status = os.waitpid(copy, 0)
finally:
    print("after", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(
    ("does", "status", "said"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise ValueError('own mistake')", 1, "ValueError: own mistake\n"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt\n"),
        ("copy, status = 0, 0; raise SystemExit(True)", 1, ""),
    ],
)
def test_a_copy_ends_with_its_own_status(does: str, status: int, said: str) -> None:
    words = [sys.executable, "-c", PROGRAM.format(does=does)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"after {status}\n")
    assert done.stderr.endswith(said) and (said or not done.stderr)


def test_a_copy_that_goes_on_to_the_end_of_the_block_ends_there() -> None:
    program = PROGRAM.replace("            {does}\n", "            print('inside', flush=True)\n").replace(
        "        _, status = os.waitpid(copy, 0)\n", "        else:\n            _, status = os.waitpid(copy, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "inside\nafter 0\n"


def test_the_process_itself_leaves_as_it_would() -> None:
    program = "from dryfit.processes.process import CopiesEndHere\nwith CopiesEndHere():\n    raise SystemExit(4)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (4, "")
