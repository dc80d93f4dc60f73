"""Write docs/licenses.md: the license of every package that dryfit and each of its extras install: `make licenses`.

All extras for users are installed in a temporary environment, in the versions of constraints.txt, and what their
metadata says is read there.
"""

import json
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from throwaway import CONSTRAINTS, ROOT, CheckError, make_environment, run, temporary_folder, timed

PAGE = ROOT / "docs" / "licenses.md"
OURS = "dryfit"
BASE = "dryfit"
NOT_OF_USERS = ("dev", "site")
UNKNOWN = "unknown"

_ASK = """
import json
from importlib.metadata import distributions
from packaging.requirements import Requirement
found = {}
for one in distributions():
    said = one.metadata
    found[said["Name"]] = {
        "version": one.version,
        "expression": said.get("License-Expression") or "",
        "text": (said.get("License") or "").strip().partition("\\n")[0],
        "classifiers": [text.split(" :: ")[-1] for text in said.get_all("Classifier") or () if text[:7] == "License"],
        "requires": one.requires or [],
    }
print(json.dumps(found))
"""

_SPDX = {
    r"apache( software)?( license)?,?( version)?( 2(\.0)?)?( license)?": "Apache-2.0",
    r"apache software license 2\.0": "Apache-2.0",
    r"mit( license)?": "MIT",
    r"(3-clause bsd|bsd[ -]3-clause)( license)?.*": "BSD-3-Clause",
    r"bsd 2-clause license": "BSD-2-Clause",
    r"bsd( license)?": "BSD",
    r"isc license( \(iscl\))?": "ISC",
    r"mozilla public license 2\.0 \(mpl 2\.0\)": "MPL-2.0",
    r"python software foundation license": "PSF-2.0",
    r"gnu general public license v3 \(gplv3\)": "GPL-3.0",
}
"""How packages without an SPDX expression write their license."""
KNOWN = re.compile(
    r"(0BSD|Apache-2\.0|BSD|BSD-[23]-Clause|BSL-1\.0|CC0-1\.0|CNRI-Python|HPND|ISC|MIT|MIT-0|MIT-CMU|PSF-2\.0|Unlicense"
    r"|Zlib|LLVM-exception|[AL]?GPL-[\d.]+(-only|-or-later)?|MPL-2\.0|AND|OR|WITH)"
)
COPYLEFT = re.compile(r"\b(LGPL|MPL)-")
_INCOMPATIBLE = re.compile(r"\bA?GPL-|-NC\b|Proprietary", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package; ``license`` is an SPDX expression, as far as its metadata says one."""

    name: str
    version: str
    license: str
    requires: tuple[str, ...]


def license_of(said: Mapping[str, Any]) -> str:
    """Return the license that a package's metadata names: an expression, a text or a classifier, or ``unknown``."""
    if said["expression"]:
        return said["expression"]
    for text in (said["text"], *said["classifiers"]):
        spdx = next((name for words, name in _SPDX.items() if re.fullmatch(words, text, re.IGNORECASE)), text)
        if spdx and all(KNOWN.fullmatch(word) for word in re.findall(r"[^\s()]+", spdx)):
            return spdx
    return UNKNOWN


def closure(packages: Mapping[str, Package], wanted: Sequence[str]) -> Iterator[Package]:
    """Yield what requirements bring: themselves and what they need, as far as it is installed."""
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in wanted]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        package = packages.get(canonicalize_name(requirement.name))
        for taken in ("", *requirement.extras):
            if package is None or (package.name, taken) in seen:
                continue  # of another platform, or known
            seen.add((package.name, taken))
            waiting += [(Requirement(text), taken) for text in package.requires]
            if not taken and package.name != OURS:
                yield package


def wanted_by_extra() -> dict[str, list[str]]:
    """Return what pyproject.toml declares for dryfit itself and for each extra of users, without extras of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = {BASE: project["dependencies"]}
    for extra, texts in project["optional-dependencies"].items():
        own = [text for text in texts if Requirement(text).name != OURS]
        if extra not in NOT_OF_USERS and own:
            found[f"{OURS}[{extra}]"] = own
    return found


def page(packages: Mapping[str, Package]) -> str:
    """Return the page: a table for dryfit itself and for each extra, of what those before do not bring already."""
    tables: list[str] = []
    bringer: dict[str, str] = {}
    for title, wanted in wanted_by_extra().items():
        direct = {canonicalize_name(Requirement(text).name) for text in wanted}
        rows = {canonicalize_name(package.name): package for package in closure(packages, wanted)}
        own = [one for name, one in sorted(rows.items()) if name in direct or name not in bringer]
        bringer = dict.fromkeys(rows, title) | bringer
        lines = [f"| {_shown(one, direct)} | {one.version} | {one.license} |" for one in own]
        tables.append("\n".join([f"## {title}", "", "| package | version | license |", "|---|---|---|", *lines]))
    every = [packages[name] for name in sorted(bringer)]

    def named(found: Callable[[Package], object]) -> str:
        said = [
            f"{one.name} ({one.license}, by `{bringer[canonicalize_name(one.name)]}`)" for one in every if found(one)
        ]
        return ", ".join(said) or "none"

    head = HEAD.format(
        count=len(every),
        asking=named(lambda one: COPYLEFT.search(one.license)),
        unknown=named(lambda one: one.license == UNKNOWN),
        incompatible=named(lambda one: _INCOMPATIBLE.search(one.license)),
    )
    return "\n\n".join([head, *tables]) + "\n"


def _shown(package: Package, direct: Collection[str]) -> str:
    return f"**{package.name}**" if canonicalize_name(package.name) in direct else package.name


HEAD = """# Licenses of what dryfit installs

dryfit is Apache-2.0 and contains no file of another package ([NOTICE](../NOTICE) names the sources of numbers).
Below stand the {count} packages that `pip install dryfit` and its extras bring on Linux and Python 3.11, each with the
license that its metadata names. Direct dependencies are bold; another package stands where it comes first.

- **Asks more than its notice of whoever passes it on**: {asking}. dryfit uses each as a separate, unchanged package.
- **License unknown**, because the metadata says none: {unknown}.
- **Incompatible with Apache-2.0** (GPL, AGPL, non-commercial, proprietary): {incompatible}.
- A CUDA build of torch brings NVIDIA's libraries under NVIDIA's own terms. The tables have the CPU build, without them.

`make licenses` writes this page from what is installed; a test fails where a direct dependency is missing."""


def installed(folder: Path) -> dict[str, Package]:
    """Install dryfit with every extra of users in a new environment, and return what is there then."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = ",".join(extra for extra in project["optional-dependencies"] if extra not in NOT_OF_USERS)
    environment = make_environment(folder / "environment")
    environment.install("-c", CONSTRAINTS, "torch")
    environment.install("-c", CONSTRAINTS, f"{OURS}[{extras}] @ {ROOT.as_uri()}")
    said: dict[str, Any] = json.loads(run([environment.python, "-I", "-c", _ASK], cwd=folder).stdout)
    return {
        canonicalize_name(name): Package(name, one["version"], license_of(one), tuple(one["requires"]))
        for name, one in said.items()
    }


def main() -> int:
    """Write the page; return 1 where the environment cannot be made."""
    try:
        with temporary_folder("licenses") as folder, timed("installing every extra in a new environment"):
            packages = installed(folder)
    except CheckError as error:
        print(f"make licenses: {error}", file=sys.stderr)
        return 1
    PAGE.write_text(page(packages), "utf-8")
    print(f"{PAGE.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
