"""The host's memory: what is left for more trials."""

import os

import pytest

from dryfit.runtime import host
from dryfit.runtime.host import HostLook, look_at_host


def test_what_is_promised_is_not_given_twice() -> None:
    look = HostLook(total_bytes=1000, free_bytes=700, rss_bytes={1: 150, 2: 400})
    assert look.room_bytes({}) == 600, "a tenth stays free"
    assert look.room_bytes({1: 250}) == 500
    assert look.room_bytes({1: 250, 2: 300}) == 500, "one that takes more than expected gives nothing back"
    assert look.room_bytes({1: 250, -5: 600}) == 0


def test_this_machine() -> None:
    look = look_at_host([os.getpid(), 2**22 + 1])
    assert 0 < look.free_bytes < look.total_bytes
    assert set(look.rss_bytes) == {os.getpid()}


def test_the_control_group_bounds_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = look_at_host([os.getpid()])
    limit = whole.rss_bytes[os.getpid()] + (64 << 20)
    monkeypatch.setattr(host, "memory_limit_bytes", lambda: limit)
    look = look_at_host([os.getpid()])
    assert look.total_bytes == limit and look.free_bytes < limit
