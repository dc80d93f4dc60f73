"""What the facts of a machine mean, and how they are gathered."""

import errno
import fcntl
import os
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dryfit.settings import installed
from dryfit.settings.check_messages import ProbeResult
from dryfit.settings.choices import Wall
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.study import machine_checks as gathered
from dryfit.study import machine_checks as tried
from dryfit.study.machine_checks import (
    Driver,
    Finding,
    FolderFacts,
    Gpu,
    MachineFacts,
    Package,
    RoundTrip,
    Status,
    driver,
    folder_findings,
    hub_cache,
    look_at_folder,
    machine_facts,
    machine_findings,
    nearest_folder,
    packages,
)
from golden import Golden

CARD = DeviceSpec(name="A card", capacity_bytes=23 << 30, capability=(8, 9))
SEEN = Driver(version="600.1", cuda="13.0", gpus=(Gpu("A card", 24 << 30, 1 << 30),))
ROOM = FolderFacts(Path("/x"), "ext4", 100 << 30)
GOOD = MachineFacts(
    python="3.12.1",
    system="Linux 6, x86_64",
    packages=(
        Package("torch", ">=2.11", "2.13.0", True),
        Package("peft", ">=0.18", "0.21.2", True, ("lora",)),
        Package("bitsandbytes", ">=0.50", None, False, ("8bit",)),
    ),
    cores=2,
    cores_here=8,
    memory_bytes=64 << 30,
    memory_free_bytes=32 << 30,
    memory_limit_bytes=None,
    open_files=4096,
    shared_memory=ROOM,
    cache=ROOM,
    hub_cache=ROOM,
    wall=Wall.NAMESPACES,
    offline=(),
    driver=SEEN,
    visible_devices=None,
)
PROBE = ProbeResult(torch="2.13.0", cuda_build="13.0", devices=(CARD,))
CHILDREN = ("fork server", "fresh interpreter", "GPU")
TRIPS = (RoundTrip("fork server", 6.0, 0.02, probe=PROBE), RoundTrip("fresh interpreter", 5.0, probe=PROBE))


def judged(facts: MachineFacts, trips: tuple[RoundTrip, ...] = TRIPS) -> dict[str, Finding]:
    return {finding.check: finding for finding in machine_findings(facts, trips)}


def probed(**changes: Any) -> tuple[RoundTrip, ...]:
    return (RoundTrip("fork server", 6.0, 0.02, probe=PROBE.model_copy(update=changes)),)


def told(findings: Iterable[Finding]) -> list[tuple[str, ...]]:
    return [(one.status, one.check, one.found, one.fix) for one in findings]


def test_a_good_machine_passes_and_says_what_it_is(golden: Golden) -> None:
    found = judged(GOOD).values()
    assert {finding.status for finding in found} == {Status.PASS}
    golden("doctor", told(found))


OLD = replace(GOOD.packages[0], found="2.4.0", allowed=False)
OLD_EXTRA = replace(GOOD.packages[1], found="0.9", allowed=False)


SHORT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("libraries", {"packages": (OLD,)}),
    ("libraries", {"packages": ()}),
    ("extra lora", {"packages": (GOOD.packages[0], OLD_EXTRA)}),
    ("memory", {"memory_free_bytes": 1 << 30}),
    ("memory", {"memory_limit_bytes": 1 << 30}),
    *(("open files", {"open_files": count}) for count in (512, 64, -1)),
    ("/dev/shm", {"shared_memory": replace(ROOM, free_bytes=64 << 20)}),
    ("/dev/shm", {"shared_memory": replace(ROOM, not_writable="no")}),
    ("plans' cache", {"cache": replace(ROOM, not_writable="no")}),
    ("hub cache", {"hub_cache": replace(ROOM, not_writable="no")}),
    ("hub cache", {"hub_cache": replace(ROOM, free_bytes=1)}),
    *(("files in rehearsals", {"wall": wall}) for wall in (Wall.LANDLOCK, Wall.REDIRECT)),
    ("offline", {"offline": ("HF_HUB_OFFLINE",)}),
)


def test_what_is_short_is_said_with_its_fix(golden: Golden) -> None:
    golden("doctor", told(judged(replace(GOOD, **changes))[check] for check, changes in SHORT))


GPUS: tuple[tuple[Driver, dict[str, Any], str | None], ...] = (
    (SEEN, {"devices": (), "cuda_build": None}, None),
    *((SEEN, {"devices": ()}, visible) for visible in (None, "", "-1", "7")),
    (SEEN, {"devices": (), "trouble": "cuda:0: no kernel image"}, None),
    (SEEN, {"trouble": "cuda:1: broken"}, None),
    (Driver(trouble="no library"), {"devices": ()}, None),
)


def test_gpus(golden: Golden) -> None:
    facts = [(replace(GOOD, driver=seen, visible_devices=visible), probed(**probe)) for seen, probe, visible in GPUS]
    golden("doctor", told(judged(*one)["GPU"] for one in facts))


def test_children_that_do_not_start(golden: Golden) -> None:
    no_fork = (RoundTrip("fork server", 9.0, trouble="it has threads"), TRIPS[1])
    none = (RoundTrip("fresh interpreter", 9.0, trouble="died"),)
    every = [judged(GOOD, trips) for trips in (no_fork, none)]
    golden("doctor", *(told(one for one in found.values() if one.check in CHILDREN) for found in every))


FOLDERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("locks", {}),
    ("folder", {"not_writable": "Read-only file system"}),
    ("locks", {"not_locked": "two holders"}),
    *(("locks", {"file_system": name}) for name in ("nfs4", "fuse.sshfs")),
    ("renames", {"not_durable": "No space left on device"}),
)


def test_a_study_s_folder(golden: Golden) -> None:
    every = [(check, folder_findings("study", replace(ROOM, **changes))) for check, changes in FOLDERS]
    golden("doctor", told(one for check, found in every for one in found if one.check == check))


def test_this_machine_is_asked_without_a_child(tmp_path: Path) -> None:
    environment = {
        "DRYFIT_CACHE": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "0",
    }
    facts = machine_facts(environment, tmp_path)
    assert 0 < facts.cores <= facts.cores_here
    assert 0 < facts.memory_free_bytes <= facts.memory_bytes
    assert facts.offline == ("HF_HUB_OFFLINE",)
    assert facts.cache.folder == facts.hub_cache.folder == tmp_path  # what is not there yet is looked for above
    assert not facts.cache.not_writable
    assert list(tmp_path.iterdir()) == []


def test_libraries_are_those_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["pytest>=999", 'hypothesis>=1; extra == "one"', 'hypothesis>=1; extra == "two"', 'ruff; extra == "dev"']
    monkeypatch.setattr(installed, "requires", lambda name: [*lines, "no-such-library-anywhere"])
    found = {one.name: one for one in packages()}
    assert set(found) == {"pytest", "hypothesis", "no-such-library-anywhere"}
    assert not found["pytest"].allowed and found["pytest"].wanted == ">=999"
    assert found["hypothesis"].allowed and found["hypothesis"].extras == ("one", "two")
    assert found["no-such-library-anywhere"].found is None

    def nobody(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "requires", nobody)
    assert packages() == ()


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, "/home/me/.cache/huggingface/hub"),
    ],
)
def test_where_the_hub_keeps_its_models(environment: dict[str, str], place: str) -> None:
    assert hub_cache(environment, Path("/home/me")) == Path(place)


def test_the_driver_is_asked_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    class NvmlError(Exception):
        pass

    def refuse() -> None:
        raise NvmlError("Driver Not Loaded")

    closed: list[bool] = []
    nvml = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: closed.append(True),
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13020,
        nvmlSystemGetDriverVersion=lambda: "600.1",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24, used=1),
        nvmlDeviceGetName=lambda handle: "A card",
    )
    monkeypatch.setattr(gathered, "import_module", lambda name: nvml)
    assert driver() == Driver("600.1", "13.2", (Gpu("A card", 24, 1),))
    assert closed == [True]
    nvml.nvmlInit = refuse
    assert driver() == Driver(trouble="Driver Not Loaded")


# ---- What a folder's file system can do


def test_a_good_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    facts = look_at_folder(tmp_path)
    assert (facts.folder, facts.not_writable, facts.not_locked, facts.not_durable) == (tmp_path, "", "", "")
    assert facts.free_bytes > 0 and facts.file_system
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_yet_is_judged_by_the_nearest_above(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    (tmp_path / "file").touch()
    assert look_at_folder(tmp_path / "file" / "b").folder == tmp_path
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tried.tempfile, "TemporaryDirectory", refuse)
    assert look_at_folder(tmp_path).not_writable == "Read-only file system"


def test_locks_that_keep_nobody_out_or_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    assert look_at_folder(tmp_path).not_locked == "two holders got the same lock"

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert look_at_folder(tmp_path).not_locked == "No locks available"


def test_a_file_system_that_cannot_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    assert look_at_folder(tmp_path).not_durable == "Invalid argument"


def test_the_longest_mount_point_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mount:
        def __init__(self, mountpoint: str, fstype: str) -> None:
            self.mountpoint, self.fstype = mountpoint, fstype

    mounts = [Mount("/", "ext4"), Mount(str(tmp_path), "nfs4"), Mount(f"{tmp_path}x", "tmpfs")]
    monkeypatch.setattr(tried.psutil, "disk_partitions", lambda all: mounts)
    (tmp_path / "study").mkdir()
    assert look_at_folder(tmp_path / "study").file_system == "nfs4"
