"""Run a function in a fork of this process: what it patches ends with it."""

import json
import os
import traceback
from collections.abc import Callable
from typing import Any


def in_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns, which JSON can hold; what it raises fails here with its traceback."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            answer = {"value": function()}
        except BaseException:  # told to the parent
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    assert told, f"the fork ended with status {status}"
    answer = json.loads(told)
    assert "error" not in answer, answer["error"]
    return answer["value"]
