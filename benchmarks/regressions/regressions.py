"""Replay public changes that cost GPU memory, and commits that cost none, through ``dryfit check``.

``python benchmarks/regressions/regressions.py FOLDER [--peft CHECKOUT]``: packages go into FOLDER, the tables into
docs/check.md. A package that cannot be installed is an error: a row that did not run has not passed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final

_HERE: Final = Path(__file__).parent
_REPOSITORY: Final = _HERE.parent.parent
_PAGE: Final = _REPOSITORY / "docs" / "check.md"
_TABLE: Final = "<!-- table: written by benchmarks/regressions/regressions.py -->\n"
_QUIET: Final = "<!-- quiet commits: written by benchmarks/regressions/regressions.py -->\n"
_END: Final = "<!-- end -->\n"
_DRYFIT: Final = Path(sys.executable).with_name("dryfit")
_NAMED: Final = 3
"""The guilty line must be among so many."""
_CONTROLS: Final = ("entropy", "upcast")
_PEAK: Final = "allocated_bytes"
_HEAD: Final = (
    "| change | what changed | reported, MiB | `dryfit check`, MiB | off by | guilty line | its place |\n"
    "|---|---|--:|--:|--:|---|--:|\n"
)


def main() -> None:
    """Run all rows, and the quiet commits where a checkout is given."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("folder", type=Path)
    asked.add_argument("--peft", type=Path, help="a git repository of huggingface/peft, for the quiet commits")
    given = asked.parse_args()
    folder = given.folder.absolute()
    rows = tomllib.loads((_HERE / "rows.toml").read_text(encoding="utf-8"))
    run = f"Run {date.today()} by dryfit {_commit()}"
    parts = [f"{run}, on a virtual A100 with 80 GB.\n\n", _HEAD]
    parts += [_told(row, _replayed(name, row, folder / name)) for name, row in rows.items()]
    parts.append(_controls(rows, folder))
    _put(_TABLE, "".join(parts))
    if given.peft:
        _put(_QUIET, f"{run}. {_quiet(given.peft.absolute(), folder / 'quiet')}")


def _put(begin: str, text: str) -> None:
    """Replace what stands between a mark of the page and the next end."""
    before, _, rest = _PAGE.read_text(encoding="utf-8").partition(begin)
    _PAGE.write_text(f"{before}{begin}{text}{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def _replayed(name: str, row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Check a script and its libraries before the change, then after it; return what is said of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_runs(folder, name, row.get("command", "train.py"))
    shutil.rmtree(folder / ".dryfit", ignore_errors=True)
    found: dict[str, Any] = {}
    for when in ("before", "after"):
        packages = _installed(folder / when, row[when])
        alone = _HERE / "scripts" / f"{name}.py"
        shutil.copyfile(alone if alone.exists() else alone.with_stem(f"{name}_{when}"), folder / "train.py")
        found = _checked(folder, packages, update=when == "before")
    return found


def _write_runs(folder: Path, name: str, command: str = "train.py") -> None:
    (folder / "gpu-memory.toml").write_text(
        f'[run.{name}]\ncommand = "{command}"\ndevice = "a100-80"\n', encoding="utf-8"
    )


def _installed(folder: Path, packages: Sequence[str]) -> Path:
    """Return a folder with packages in these versions alone; what they need comes from this environment."""
    place, kept = folder / "site-packages", folder / "packages"
    text = "\n".join(packages)
    if not kept.exists() or kept.read_text(encoding="utf-8") != text:
        shutil.rmtree(folder, ignore_errors=True)
        place.mkdir(parents=True)
        if packages:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), *packages]
            subprocess.run(pip, check=True)
        kept.write_text(text, encoding="utf-8")
    return place


def _checked(folder: Path, packages: Path, *, update: bool) -> dict[str, Any]:
    """Return what ``dryfit check --json`` says of the only run in a folder."""
    command = [str(_DRYFIT), "check", "--json", *(("--update",) if update else ())]
    environment = {**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    (run,) = json.loads(done.stdout)["runs"]
    if run["fits"] is None:
        raise SystemExit(f"{folder.name}: {'; '.join(run['reasons'])}")
    return run


def _controls(rows: dict[str, dict[str, Any]], folder: Path) -> str:
    """Replay a row backwards, and one without a change: neither may alarm; return what was found."""
    name, same = _CONTROLS
    row = rows[name]
    back = _replayed(name, {**row, "before": row["after"], "after": row["before"]}, folder / f"{name}_backwards")
    again = _replayed(same, {**rows[same], "after": rows[same]["before"]}, folder / f"{same}_again")
    said = [
        f"{what}: {found['verdict']}, {(found['after'][_PEAK] - found['before'][_PEAK]) / 2**20:+,.1f} MiB"
        for what, found in ((f"`{name}` backwards", back), (f"`{same}` with the same versions", again))
    ]
    return f"\nWithout a change for the worse: {'; '.join(said)}.\n"


def _told(row: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the line of a row: what the thread says, and what was found."""
    lines = found["lines"]
    places = [at for at, line in enumerate(lines, 1) if row["guilty"] in f"{line['code']} {line['source_code']}"]
    place = places[0] if places else None
    if row["of"] == "line":
        grown = 0 if place is None else lines[place - 1]["difference_bytes"]
    else:
        grown = found["after"][f"{row['of']}_bytes"] - found["before"][f"{row['of']}_bytes"]
    measured_mib, reported_mib = grown / 2**20, row["reported_mib"]
    verdict = "" if found["verdict"] == "grew" else f"**{found['verdict']}** "
    named = "**not named**" if place is None or place > _NAMED else str(place)
    return (
        f"| [{row['about']}]({row['link']}) | {_changed(row)} "
        f"| {reported_mib:,g} ({row['basis']}) | {verdict}{measured_mib:+,.1f} ({row['of']}) "
        f"| {measured_mib / reported_mib - 1:+.1%} | `{row['guilty']}` | {named} |\n"
    )


def _changed(row: dict[str, Any]) -> str:
    """Return the first package of another version, or that the script was changed."""
    pairs = zip(row["before"], row["after"], strict=True)
    return next(
        (f"{old.replace('==', ' ')} to {new.partition('==')[2]}" for old, new in pairs if old != new), "the script"
    )


def _quiet(checkout: Path, folder: Path) -> str:
    """Check commits, named beforehand, that change nothing for the script; return what was found."""
    first, *commits = (_HERE / "quiet_commits.txt").read_text(encoding="utf-8").split()
    packages = folder / "site-packages"
    folder.mkdir(parents=True, exist_ok=True)
    _write_runs(folder, "quiet")
    shutil.copyfile(_HERE / "scripts" / "adapters.py", folder / "train.py")
    alarms: list[str] = []
    for commit in (first, *commits):
        shutil.rmtree(packages, ignore_errors=True)
        packages.mkdir()
        archive = subprocess.run(
            ["git", "-C", str(checkout), "archive", commit, "src/peft"], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "--strip-components=1", "-C", str(packages)], input=archive.stdout, check=True)
        found = _checked(folder, packages, update=commit == first)
        if commit != first and found["verdict"] != "within":
            alarms.append(f"{commit} ({found['verdict']})")
    said = ", ".join(alarms) or "none"
    return (
        f"Quiet commits: {len(commits)} of huggingface/peft, {commits[0][:9]} to {commits[-1][:9]}, each held against "
        f"the baseline of {first[:9]} by the script of `adapters`. Alarms: {said}.\n"
    )


def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(_REPOSITORY), "rev-parse", "--short=8", "HEAD"], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
