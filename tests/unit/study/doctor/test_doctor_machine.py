"""What the facts of a machine mean, and how they are gathered."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dryfit.core.jobs.diagnostics import ProbeResult
from dryfit.core.settings.execution import DeviceSpec
from dryfit.core.wall.places import WALLS, Wall
from dryfit.study.doctor import machine_facts as gathered
from dryfit.study.doctor.finding import Finding, Status
from dryfit.study.doctor.folder import FolderFacts
from dryfit.study.doctor.machine_checks import folder_findings, machine_findings
from dryfit.study.doctor.machine_facts import (
    Driver,
    Gpu,
    MachineFacts,
    Package,
    RoundTrip,
    driver,
    hub_cache,
    machine_facts,
    packages,
)

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
TRIPS = (RoundTrip("fork server", 6.0, 0.02, probe=PROBE), RoundTrip("fresh interpreter", 5.0, probe=PROBE))


def judged(facts: MachineFacts, trips: tuple[RoundTrip, ...] = TRIPS) -> dict[str, Finding]:
    return {finding.check: finding for finding in machine_findings(facts, trips)}


def probed(**changes: Any) -> tuple[RoundTrip, ...]:
    return (RoundTrip("fork server", 6.0, 0.02, probe=PROBE.model_copy(update=changes)),)


def test_a_good_machine_passes_and_says_what_it_is() -> None:
    found = judged(GOOD)
    assert {finding.status for finding in found.values()} == {Status.PASS}
    assert found["cores"].found == "2 (of 8: the affinity or the control group allows no more)"
    assert found["fork server"].found == "a child answered after 6.0 s, a second one after 20 ms"
    assert found["GPU"].found.startswith("torch 2.13.0 can use A card (23.0 GiB); driver 600.1 (CUDA 13.0)")
    assert "not installed" in found["extra 8bit"].found


OLD = replace(GOOD.packages[0], found="2.4.0", allowed=False)
OLD_EXTRA = replace(GOOD.packages[1], found="0.9", allowed=False)


@pytest.mark.parametrize(
    ("changes", "check", "status", "said", "fix"),
    [
        ({"packages": (OLD,)}, "libraries", Status.FAIL, "torch is 2.4.0, wanted: >=2.11", "pip install 'torch>=2.11'"),
        ({"packages": ()}, "libraries", Status.WARN, "not installed as a package", "pip install"),
        ({"packages": (GOOD.packages[0], OLD_EXTRA)}, "extra lora", Status.WARN, "peft is 0.9", "'peft>=0.18'"),
        ({"memory_free_bytes": 1 << 30}, "memory", Status.WARN, "1.0 GiB of it free", "free some"),
        ({"memory_limit_bytes": 1 << 30}, "memory", Status.WARN, "control group allows 1.0 GiB", "free some"),
        ({"open_files": 512}, "open files", Status.WARN, "512", "ulimit -n 4096"),
        ({"open_files": 64}, "open files", Status.FAIL, "64", "ulimit -n 4096"),
        ({"open_files": -1}, "open files", Status.PASS, "no limit", ""),
        (
            {"shared_memory": replace(ROOM, free_bytes=64 << 20)},
            "/dev/shm",
            Status.WARN,
            "64 MiB",
            "loader_workers = 0",
        ),
        ({"shared_memory": replace(ROOM, not_writable="no")}, "/dev/shm", Status.FAIL, "no", "--shm-size"),
        ({"cache": replace(ROOM, not_writable="no")}, "plans' cache", Status.WARN, "/x: no", "DRYFIT_CACHE"),
        ({"hub_cache": replace(ROOM, not_writable="no")}, "hub cache", Status.WARN, "/x: no", "HF_HOME"),
        ({"hub_cache": replace(ROOM, free_bytes=1)}, "hub cache", Status.WARN, "0 MiB free", "free some space"),
        ({"wall": Wall.LANDLOCK}, "files in rehearsals", Status.PASS, WALLS[Wall.LANDLOCK], ""),
        ({"wall": Wall.REDIRECT}, "files in rehearsals", Status.WARN, WALLS[Wall.REDIRECT], "Landlock"),
        ({"offline": ("HF_HUB_OFFLINE",)}, "offline", Status.PASS, "HF_HUB_OFFLINE: only models", ""),
    ],
)
def test_what_is_short_is_said_with_its_fix(
    changes: dict[str, Any], check: str, status: Status, said: str, fix: str
) -> None:
    found = judged(replace(GOOD, **changes))[check]
    assert found.status is status
    assert said in found.found and fix in found.fix


@pytest.mark.parametrize(
    ("seen", "probe", "visible", "status", "said"),
    [
        (SEEN, {"devices": (), "cuda_build": None}, None, Status.WARN, "is a CPU build"),
        (SEEN, {"devices": ()}, None, Status.FAIL, "finds none"),
        (SEEN, {"devices": ()}, "", Status.PASS, "hidden by CUDA_VISIBLE_DEVICES"),
        (SEEN, {"devices": ()}, "-1", Status.PASS, "hidden by CUDA_VISIBLE_DEVICES"),
        (SEEN, {"devices": ()}, "7", Status.FAIL, "finds none"),
        (SEEN, {"devices": (), "trouble": "cuda:0: no kernel image"}, None, Status.FAIL, "no kernel image"),
        (SEEN, {"trouble": "cuda:1: broken"}, None, Status.FAIL, "cuda:1: broken"),
        (Driver(trouble="no library"), {"devices": ()}, None, Status.PASS, "none (no library)"),
    ],
)
def test_gpus(seen: Driver, probe: dict[str, Any], visible: str | None, status: Status, said: str) -> None:
    found = judged(replace(GOOD, driver=seen, visible_devices=visible), probed(**probe))["GPU"]
    assert (found.status, said in found.found) == (status, True), found


def test_children_that_do_not_start() -> None:
    no_fork = (RoundTrip("fork server", 9.0, trouble="it has threads"), TRIPS[1])
    found = judged(GOOD, no_fork)
    assert found["fork server"].status is Status.WARN and 'isolation = "fresh"' in found["fork server"].fix
    assert found["GPU"].status is Status.PASS
    found = judged(GOOD, (RoundTrip("fresh interpreter", 9.0, trouble="died"),))
    assert found["fresh interpreter"].status is Status.FAIL
    assert found["GPU"].status is Status.WARN and "no child could be asked" in found["GPU"].found


@pytest.mark.parametrize(
    ("changes", "check", "status", "said"),
    [
        ({}, "locks", Status.PASS, "refused"),
        ({"not_writable": "Read-only file system"}, "folder", Status.FAIL, "/x: Read-only"),
        ({"not_locked": "two holders"}, "locks", Status.FAIL, "two holders (ext4)"),
        ({"file_system": "nfs4"}, "locks", Status.WARN, "(nfs4)"),
        ({"file_system": "fuse.sshfs"}, "locks", Status.WARN, "network file system"),
        ({"not_durable": "No space left on device"}, "renames", Status.FAIL, "No space left"),
    ],
)
def test_a_study_s_folder(changes: dict[str, Any], check: str, status: Status, said: str) -> None:
    found = {finding.check: finding for finding in folder_findings("study", replace(ROOM, **changes))}
    assert (found[check].status, said in found[check].found) == (status, True), found[check]


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
    monkeypatch.setattr(gathered, "requires", lambda name: [*lines, "no-such-library-anywhere"])
    found = {one.name: one for one in packages()}
    assert set(found) == {"pytest", "hypothesis", "no-such-library-anywhere"}
    assert not found["pytest"].allowed and found["pytest"].wanted == ">=999"
    assert found["hypothesis"].allowed and found["hypothesis"].extras == ("one", "two")
    assert found["no-such-library-anywhere"].found is None

    def nobody(name: str) -> list[str]:
        raise gathered.PackageNotFoundError(name)

    monkeypatch.setattr(gathered, "requires", nobody)
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
