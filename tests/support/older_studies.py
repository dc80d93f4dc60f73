"""Reading the study folders that earlier versions of dryfit wrote; see tests/older_studies/README.md."""

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any, Final

import study_runs

HERE: Final = "/proc/self/cwd"
"""How their study files name their own folder: a path that is absolute, and right wherever the folder lies."""
KEPT: Final = Path(__file__).resolve().parents[1] / "older_studies"
ARCHIVE: Final = "files.tar.gz"
READABLE: Final = ("study.toml", "frozen.toml", "ledger.jsonl")
"""What is kept as it is; all else of a study's folder is in the archive beside."""


def pack(folder: Path, target: Path) -> None:
    """Keep a study's folder."""
    target.mkdir(parents=True)

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
        return None if Path(member.name).name in ("__pycache__", *READABLE) else member

    for name in READABLE:
        shutil.copyfile(folder / name, target / name)
    with tarfile.open(target / ARCHIVE, "w:gz") as archive:
        archive.add(folder, arcname=".", filter=kept)


def unpack(kept: Path, folder: Path) -> Path:
    """Write a study's folder as it was, but for the base model that its adapters name."""
    shutil.unpack_archive(kept / ARCHIVE, folder, filter="data")
    for name in READABLE:
        shutil.copyfile(kept / name, folder / name)
    created, *_ = (folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    for file in folder.rglob("adapter_config.json"):  # an absolute path without links, of where the folder lay
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(json.loads(created)["folder"], str(folder)), encoding="utf-8")
    return folder


def trials_of(folder: Path) -> list[dict[str, Any]]:
    """Every trial as JSON: what was asked of it, and what it came to."""
    return [
        {
            "params": trial.params,
            "seed": trial.seed,
            "outcome": str(trial.outcome) if trial.outcome is not None else None,
            "values": list(trial.values or ()),
            "attempts": len(trial.attempts),
            "reports": [[point.n, point.step, point.value] for point in trial.reports],
        }
        for trial in study_runs.fold(folder).trials
    ]


def interrupted(folder: Path) -> dict[str, int]:
    """The one trial that has not ended, and the step from which it can go on."""
    (trial,) = study_runs.fold(folder).open_trials
    return {"trial": trial.number, "step": max(attempt.checkpoint_step or 0 for attempt in trial.attempts)}


def models_in(folder: Path) -> list[str]:
    """Every folder with a model that dryfit saved, relative to the study's; of an ensemble the whole alone."""
    found = sorted(path.parent.relative_to(folder) for path in folder.rglob("dryfit.json"))
    return [str(path) for path in found if "members" not in path.parts]


def predictions(folder: Path, model: str) -> list[dict[str, Any]]:
    """What ``dryfit predict`` says, by one of a study's models, of the rows in its ``rows.jsonl``."""
    out = folder.parent / "predicted.jsonl"
    done = study_runs.run_here("predict", folder / model, folder / "rows.jsonl", "--out", out, "--force", "--quiet")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
