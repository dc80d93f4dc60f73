"""Whatever a test of this folder kills: nobody may be left."""

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from chaos import carriers

_OWNER = "DRYFIT_CHAOS_TEST"
_PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process that a test makes inherits a name that is the test's alone: none of them may outlive it.

    Whoever is being killed needs a moment to be gone. Processes of others have another name, and are left alone.
    """
    name = uuid.uuid4().hex
    monkeypatch.setenv(_OWNER, name)
    yield
    deadline_s = time.monotonic() + _PATIENCE_S
    while (left := carriers(_OWNER, name)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    told: list[str] = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            told.append(f"{process.pid} {process.cmdline()}")
            process.kill()
    assert not told, f"outlived its test: {told}"
