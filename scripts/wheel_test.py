"""Build dryfit's wheel and sdist, install the wheel as a user would and use it: `make wheel-test`.

Everything happens in a temporary folder: the sources are copied there, so that nothing a build left in the repository
gets into the wheel, and no program runs where it could find them.
"""

import json
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from email import message_from_bytes
from hashlib import sha256
from pathlib import Path
from typing import Any

from throwaway import (
    CONSTRAINTS,
    ROOT,
    CheckError,
    Environment,
    check,
    copy_sources,
    make_environment,
    outside,
    run,
    temporary_folder,
    timed,
)

PACKAGE = "dryfit"
CONSUMERS = ROOT / "tests" / "wheel"
LIMIT_BYTES = 2 * 10**6
"""What neither the wheel nor the sdist may exceed."""
EXTRAS = "all,demo,lora,lion,8bit,postgres"
NEEDED = (
    "py.typed",
    "*.py",
    "*.json",
    "*.toml",
    "documents/page.html*",
    "documents/page.css",
    "documents/page.js",
    "training/model_card.md.jinja",
    "training/encoder_example.py.jinja",
    "training/lm_example.py.jinja",
)
"""Patterns of which a wheel must have at least one file each."""
IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "MANIFEST.in")
MADE_FOR_SDIST = ("PKG-INFO", "setup.cfg")
METADATA = (
    *("Summary", "License-Expression", "License-File", "Keywords", "Classifier", "Requires-Python"),
    "Description-Content-Type",
)
"""Fields of the metadata that say something."""
ROWS = 24
"""Rows left of each split, to be quick: how well a study learns is proved elsewhere."""

REHEARSE = (PACKAGE, "rehearse", "--device", "rtx4090", "train.py")
PROGRAM = """
import torch

model = torch.nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

Contents = Mapping[str, str]
"""The files of an archive, each with the hash of its bytes."""


def wheel_faults(names: Collection[str], sources: Collection[str]) -> list[str]:
    """List what is wrong with the files of a wheel.

    Args:
        names: Its files.
        sources: The files of the package in the repository, as paths below ``src``.
    """
    inside = {name for name in names if name.startswith(f"{PACKAGE}/")}
    others = {name for name in names if name.partition("/")[0] not in (PACKAGE, *_info(names))}
    faults = [f"{name} is in the repository and not in the wheel" for name in sorted(set(sources) - inside)]
    faults += [f"{name} is in the wheel and not in the repository" for name in sorted(inside - set(sources))]
    faults += [f"{name} is no file of {PACKAGE}'s" for name in sorted(others)]
    faults += [
        f"there is no {pattern} in the wheel"
        for pattern in NEEDED
        if not any(Path(name).match(f"{PACKAGE}/{pattern}") or Path(name).match(pattern) for name in inside)
    ]
    metadata = ("METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE")
    have = {name.partition("/")[2] for name in names if name.partition("/")[0] in _info(names)}
    return faults + [f"there is no {name} in the wheel's metadata" for name in metadata if name not in have]


def _info(names: Collection[str]) -> set[str]:
    return {top for name in names if re.fullmatch(rf"{PACKAGE}-[^/]+\.dist-info", top := name.partition("/")[0])}


def sdist_faults(names: Collection[str], sources: Collection[str]) -> list[str]:
    """List what is wrong with the files of an sdist; the arguments are as in :func:`wheel_faults`."""
    wanted = {*IN_SDIST, *(f"src/{name}" for name in sources)}
    faults = [f"{name} is in the repository and not in the sdist" for name in sorted(wanted - set(names))]
    allowed = {*wanted, *MADE_FOR_SDIST}
    strays = [name for name in names if name not in allowed and not name.startswith(f"src/{PACKAGE}.egg-info/")]
    return faults + [f"{name} is in the sdist" for name in sorted(strays)]


def metadata_faults(wheel: Path) -> list[str]:
    """List which fields of a wheel's metadata are empty, and that what stands for README.md is."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        found = message_from_bytes(archive.read(name))
    empty = [f"the metadata has no {field}" for field in METADATA if not found.get(field)]
    return empty if str(found.get_payload()).strip() else [*empty, "the metadata has no README.md"]


def wheel_contents(wheel: Path) -> Contents:
    """Read which files a wheel has, each with its hash."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: sha256(archive.read(name)).hexdigest() for name in archive.namelist() if not name.endswith("/")}


def sdist_names(sdist: Path) -> set[str]:
    """Read which files an sdist has, below its one folder."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """Build an sdist and a wheel from a copy of the sources, check their files, and that both make the same wheel.

    Returns:
        The wheel that was built from the sdist, and the sdist.
    """
    copy_sources(source)
    below = source / "src"
    sources = {str(path.relative_to(below)) for path in (below / PACKAGE).rglob("*") if path.is_file()}
    env = outside({"PIP_CONSTRAINT": str(CONSTRAINTS)})
    start = [sys.executable, "-m", "build", "--outdir"]
    run([*start, out / "direct", "--wheel", source], cwd=out.parent, env=env)
    shutil.rmtree(source / "build", ignore_errors=True)
    run([*start, out, source], cwd=out.parent, env=env)  # the wheel is built from the sdist
    (wheel,), (direct,), (sdist,) = out.glob("*.whl"), (out / "direct").glob("*.whl"), out.glob("*.tar.gz")
    contents = wheel_contents(wheel)
    faults = wheel_faults(contents, sources) + sdist_faults(sdist_names(sdist), sources) + metadata_faults(wheel)
    sizes = {file.name: file.stat().st_size for file in (wheel, sdist)}
    faults += [f"{name} has {size:,} bytes" for name, size in sizes.items() if size > LIMIT_BYTES]
    print("   " + ", ".join(f"{name}: {size / 1e6:.2f} MB" for name, size in sizes.items()))
    check(not faults, "\n".join(faults))
    check(contents == wheel_contents(direct), f"{wheel.name} is another one when it is built from the sdist")
    return wheel, sdist


def install(folder: Path, wheel: Path) -> Environment:
    """Install the wheel with its extras in a new environment; torch first and by its pin alone, as README.md says."""
    environment = make_environment(folder)
    environment.install("-c", CONSTRAINTS, "torch")
    before = environment.versions("torch")
    environment.install("-c", CONSTRAINTS, f"{PACKAGE}[{EXTRAS}] @ {wheel.as_uri()}")
    check(environment.versions("torch") == before, f"the extras replaced torch {before[0]}")
    run([environment.python, "-m", "pip", "check"], cwd=folder)
    code = f"import {PACKAGE}, pathlib, sys; print(pathlib.Path({PACKAGE}.__file__).is_relative_to(sys.prefix))"
    check(run([environment.python, "-I", "-c", code], cwd=folder).stdout.strip() == "True", "not the installed wheel")
    return environment


def use_alone(folder: Path, wheel: Path, with_torch: Path) -> None:
    """Install the wheel without extras in an empty environment: it rehearses where torch is, or says what to type."""
    environment = make_environment(folder / "alone")
    environment.install("-c", CONSTRAINTS, wheel)
    heavy = environment.versions("torch", "numpy", "optuna", "transformers")
    check(not any(heavy), f"without extras it brings {heavy}")
    user = User(environment, folder / "home")
    told: dict[str, Any] = json.loads(user.runs("rehearse", "--json", "--python", str(with_torch), *REHEARSE[2:]))
    check(told["verdict"] == "fits" and told["peak_allocated_bytes"] > 2**20, f"the rehearsal: {told}")
    refused = run([environment.bin / PACKAGE, *REHEARSE[1:]], cwd=user.home, env=user.env, may_fail=True)
    error, *rest = refused.stderr.splitlines()
    lacks = refused.returncode == 2 and not refused.stdout and error.endswith("has no torch    [CONFIG]")
    types = len(rest) == 1 and "type `dryfit rehearse --python " in rest[0]
    check(lacks and types, f"without torch, status {refused.returncode}:\n{refused.stderr}")


def use_at_once(folder: Path, wheel: Path, sdist: Path, with_torch: Environment) -> None:
    """Rehearse by ``uvx --from WHEEL`` with an active environment that has torch; check both files by twine."""
    tools = folder / "tools"
    run([sys.executable, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, "--target", tools, "uv"], cwd=folder)
    uvx = [tools / "bin" / "uvx", "--no-config", "--python", sys.executable, "--constraints", CONSTRAINTS, "--from"]
    own = {"HOME": str(folder / "home"), "UV_CACHE_DIR": str(folder / "uv-cache"), "UV_PYTHON_DOWNLOADS": "never"}
    env = outside({**own, "VIRTUAL_ENV": str(with_torch.folder)})
    said = run([*uvx, wheel, *REHEARSE], cwd=folder / "home", env=env).stdout
    check(said.startswith("rehearsal fits: "), f"the rehearsal by uvx: {said[:400]}")
    run([*uvx, "twine", "twine", "check", "--strict", wheel, sdist], cwd=folder, env=outside(own))


class User:
    """Somebody with dryfit installed, in a folder of their own, without a network."""

    def __init__(self, environment: Environment, home: Path) -> None:
        self.home = home
        self._program = environment.bin / PACKAGE
        self.env = outside({"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "1"})

    def runs(self, *words: str) -> str:
        """Run a command of dryfit's; return its standard output."""
        with timed(f"dryfit {' '.join(words)}"):
            return run([self._program, *words], cwd=self.home, env=self.env).stdout

    def asks(self, *words: str) -> dict[str, Any]:
        """Run a command of dryfit's with ``--json``; return its answer."""
        answer = self.runs(*words, "--json")
        found: Any = json.loads(answer)
        check(isinstance(found, dict) and found.get("schema", found.get("v")) == 1, f"not an answer: {answer[:200]}")
        return found


def use(user: User) -> None:
    """Search, plan, report, train and predict as README.md does, and look at what came of it."""
    home = user.home
    user.runs("init", "first", "--preset", "smoke")
    leave_rows(home / "first" / "data")
    tuned = user.asks("tune", "first")
    check(tuned["trials"]["complete"] == tuned["trials"]["total"] == 2, f"the study's trials: {tuned['trials']}")
    check(0 <= tuned["best"]["value"] <= 1 and tuned["best"]["params"]["optim.lr"] > 0, f"the best: {tuned['best']}")
    check(user.asks("status", "first")["best"] == tuned["best"], "status names another best trial")
    planned = user.asks("plan", "first", "--device", "8GiB")
    check(planned["verdict"] == "fits" and planned["peak_allocated_bytes"] > 2**20, f"the plan: {planned}")
    user.runs("report", "first")
    page = (home / "first" / "report" / "index.html").read_text("utf-8")
    check(page.startswith("<!") and page.rstrip().endswith("</html>") and "Plotly" in page, "the report is no page")
    trained = user.asks("train", "first", "--trial", "best", "-o", "model")
    check(trained["trial"] == tuned["best"]["number"] and set(trained["test"]) >= {"f1_macro", "loss"}, str(trained))
    check((home / "model" / "model.safetensors").stat().st_size > 2**20, "the model has no weights")
    rows = home / "first" / "data" / "test.jsonl"
    predicted = user.asks("predict", "model", str(rows), "-o", "predictions.jsonl")
    lines = [json.loads(line) for line in (home / "predictions.jsonl").read_text("utf-8").splitlines()]
    check(predicted["rows"] == len(lines) == ROWS and predicted["bad"] == 0, f"predictions: {predicted}, {len(lines)}")
    check([line["row"] for line in lines] == list(range(1, ROWS + 1)), "the predictions are not in the rows' order")
    check(all(abs(sum(line["probabilities"]) - 1) < 1e-6 for line in lines), "probabilities that do not add up to 1")


def leave_rows(data: Path) -> None:
    """Cut each split of a data set to its first rows."""
    for path in data.glob("*.jsonl"):
        lines = path.read_text("utf-8").splitlines(keepends=True)
        check(len(lines) > ROWS, f"{path.name} has {len(lines)} rows")
        path.write_text("".join(lines[:ROWS]), "utf-8")


def check_types(environment: Environment, folder: Path) -> None:
    """Check by pyright, strict, that the wheel's types serve a right program, and that a wrong one is found wrong."""
    folder.mkdir()
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}', "utf-8")
    names = ("consumer.py", "wrong_consumer.py")
    for name in names:
        shutil.copyfile(CONSUMERS / name, folder / name)
    command = [
        Path(sys.executable).parent / "pyright",
        "--outputjson",
        "--pythonpath",
        environment.python,
        "-p",
        folder,
    ]
    found = json.loads(run(command, cwd=folder, may_fail=True).stdout)
    check(found["summary"]["filesAnalyzed"] == len(names), f"pyright looked at other files: {found['summary']}")
    faults = type_faults(found["generalDiagnostics"], {name: (folder / name).read_text("utf-8") for name in names})
    check(not faults, "\n".join(faults))


def type_faults(diagnostics: Sequence[Mapping[str, Any]], programs: Mapping[str, str]) -> list[str]:
    """Compare what pyright says with the lines that are marked with ``# wrong: RULE``.

    Args:
        diagnostics: Of its JSON output.
        programs: The programs that were checked: their texts by their files' names.
    """
    said: dict[tuple[str, int], list[str]] = {}
    texts: dict[tuple[str, int], str] = {}
    for item in diagnostics:
        line = (Path(item["file"]).name, item["range"]["start"]["line"] + 1)
        said.setdefault(line, []).append(item.get("rule", ""))
        texts[line] = item["message"]
    marked = {
        (name, number): mark[1]
        for name, text in programs.items()
        for number, source in enumerate(text.splitlines(), 1)
        if (mark := re.search(r"# wrong: (\w+)$", source))
    }
    faults = [f"{name}:{line}: {texts[name, line]}" for name, line in sorted(said.keys() - marked.keys())]
    return faults + [
        f"{name}:{line}: pyright does not say {rule}: {said.get((name, line))}"
        for (name, line), rule in sorted(marked.items())
        if rule not in said.get((name, line), [])
    ]


def main() -> int:
    """Build, install and use the wheel; return 1 where something is wrong."""
    try:
        with temporary_folder("wheel") as folder:
            for name in ("source", "dist", "home"):
                (folder / name).mkdir()
            with timed("building the wheel and the sdist, and the wheel from the sdist"):
                wheel, sdist = build(folder / "source", folder / "dist")
            shutil.rmtree(folder / "source")
            with timed(f"installing {wheel.name}[{EXTRAS}] in a new environment"):
                environment = install(folder / "environment", wheel)
            with timed("the types of the installed wheel, by pyright"):
                check_types(environment, folder / "types")
            user = User(environment, folder / "home")
            use(user)
            (user.home / "train.py").write_text(PROGRAM, "utf-8")
            with timed(f"{wheel.name} by uvx, and twine"):
                use_at_once(folder, wheel, sdist, environment)
            with timed(f"{wheel.name} without extras in a new environment"):
                use_alone(folder, wheel, environment.python)
            with timed("a program that imports dryfit"):
                program = folder / "types" / "consumer.py"
                said = run([environment.python, program, "first", "model"], cwd=user.home, env=user.env).stdout
                check("trial" in said and "no-such-model" in said, said)
    except CheckError as error:
        print(f"make wheel-test: {error}", file=sys.stderr)
        return 1
    print(f"{wheel.name}: built, installed and used")
    return 0


if __name__ == "__main__":
    sys.exit(main())
