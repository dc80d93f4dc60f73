"""Whether the tests of `make test` and `make proof` notice what those of `make nightly` do: `make mutants`.

Each mutant is one small change to a module, in a copy of the sources. Where the tests that run every day pass with it,
those of the night run too: fewer examples and members may not cost a mutant.
``MODULES="parallel/axes.py"`` chooses among the modules, ``MUTANTS=20`` how many of each, ``SEED=1`` which
ones, and what the tests draw.
"""

import ast
import copy
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from resource import RLIMIT_AS, setrlimit
from typing import TypeAlias

from throwaway import CheckError, check, copy_sources, outside, run, temporary_folder

TESTS: Mapping[str, tuple[str, ...]] = {
    "gpu/caching_allocator.py": ("property/test_memory_allocator.py", "unit/memory/test_allocator.py"),
    "search/pruning.py": ("property/test_search_pruning.py", "unit/search/test_search_pruning_verdicts.py"),
    "meta/moves.py": ("unit/meta/test_moves.py",),
    "processes/packing.py": ("property/test_runtime_packing.py",),
    "parallel/axes.py": ("property/test_parallel_axes.py", "unit/parallel/test_axes.py"),
    "plans/ladder.py": ("unit/memory/test_ladder.py",),
    "processes/failures.py": ("unit/runtime/test_runtime_faults.py", "property/test_runtime_deciders.py"),
    "ledger/replay.py": ("unit/store/test_replay.py",),
    "study/next_step.py": ("unit/study/test_next_step.py",),
    "gpu/script_recorder.py": ("unit/virtual/test_places.py",),
}
"""Of each module, the files that test it and start no processes; the night has more examples or members of them."""
NEVER = "not chaos_long and not gpu and not nodes"
MEMORY_BYTES = 16 * 2**30
"""What a run may map: a mutant may ask for more and more without end."""
NO_SHRINKING = """
from hypothesis import Phase
settings.register_profile(
    "mutants", settings.get_profile("dryfit"), phases=[Phase.explicit, Phase.generate], database=None
)
settings.load_profile("mutants")
"""
"""Added to the copy's conftest.py: that an example fails is enough, it need not be the shortest."""


class Kind(StrEnum):
    """What a mutant changes."""

    OPERATOR = "operator"
    BOUND = "bound"
    BRANCH = "branch"
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to a source.

    Attributes:
        kind: What it changes.
        line: Where, counted from 1.
        before: The text that it replaces.
        after: What stands there instead.
        source: The whole source with the change.
    """

    kind: Kind
    line: int
    before: str
    after: str
    source: str


class Noticed(StrEnum):
    """Which tests fail with a mutant."""

    DAILY = "daily"
    NIGHTLY = "nightly only"
    NEVER = "neither"


Code: TypeAlias = ast.expr | ast.stmt
_OTHER: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_NOT_RUN = {"annotation", "returns", "decorator_list"}


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it; not annotations, nor parts of f-strings, whose positions are not exact."""
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        for below in value if isinstance(value, list) else [value]:
            if isinstance(below, ast.AST) and name not in _NOT_RUN:
                yield from _executed(below)


def _with(node: Code, **fields: object) -> Code:
    """Return a copy of a node that differs in some fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _changes(node: ast.AST) -> Iterator[tuple[Kind, Code, Code]]:
    """Yield what can be changed at a node: the kind, what is replaced and by what."""
    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in _OTHER:
            yield Kind.OPERATOR, node, _with(node, op=_OTHER[type(op)]())
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                if type(op) in _OTHER:
                    yield Kind.OPERATOR, node, _with(node, ops=[*ops[:at], _OTHER[type(op)](), *ops[at + 1 :]])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield Kind.OPERATOR, node, operand
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield Kind.BOUND, node, ast.Constant(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield Kind.BRANCH, test, ast.UnaryOp(ast.Not(), test)
        case ast.comprehension(ifs=tests):
            yield from ((Kind.BRANCH, test, ast.UnaryOp(ast.Not(), test)) for test in tests)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield Kind.RESULT, value, ast.Constant(None)
        case _:
            pass


def _replaced(source: str, node: Code, text: str) -> str:
    """Return a source with another text in place of a node, lines below kept where they are."""
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    new = head + text.encode() + b" \\\n" * (last - first) + tail
    return b"".join([*lines[:first], new, *lines[last + 1 :]]).decode()


def mutants(source: str) -> list[Mutant]:
    """Return every mutant of a source that can be compiled."""
    found: list[Mutant] = []
    for node in _executed(ast.parse(source)):
        for kind, old, new in _changes(node):
            text = ast.unparse(new)
            if isinstance(new, ast.expr) and not isinstance(new, ast.Constant):
                text = f"({text})"
            before = " ".join((ast.get_source_segment(source, old) or "").split())
            found.append(Mutant(kind, old.lineno, before, text, _replaced(source, old, text)))
    return [mutant for mutant in found if _compiles(mutant.source)]


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def chosen(found: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw so many mutants, of each kind as many as of any other where there are so many, in the order of lines."""
    of_kind: dict[Kind, list[Mutant]] = {kind: [] for kind in Kind}
    for mutant in found:
        of_kind[mutant.kind].append(mutant)
    for some in of_kind.values():
        random.Random(seed).shuffle(some)
    dealt = [mutant for row in zip_longest(*of_kind.values()) for mutant in row if mutant is not None]
    return sorted(dealt[:count], key=lambda mutant: mutant.line)


@dataclass(frozen=True, slots=True)
class Suite:
    """Test files in a copy of the sources.

    Attributes:
        root: The copy.
        files: Those that are run, from ``tests``.
        seed: Of what hypothesis draws.
    """

    root: Path
    files: tuple[str, ...]
    seed: int

    def passes(self, *, nightly: bool, limit_s: float | None = None) -> bool:
        """Whether all tests pass; one that does not end does not.

        Raises:
            CheckError: pytest could not run any.
        """
        marks = NEVER if nightly else f"not nightly and {NEVER}"
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", f"--hypothesis-seed={self.seed}", "-m", marks]
        env = _environment(self.root) | ({"DRYFIT_FULL": "1", "DRYFIT_COLD": "1"} if nightly else {})
        command = [sys.executable, "-m", "pytest", *options, *(f"tests/{name}" for name in self.files)]
        try:
            done = subprocess.run(
                command,
                cwd=self.root,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
                preexec_fn=lambda: setrlimit(RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
            )
        except subprocess.TimeoutExpired:
            return False
        check(done.returncode not in (4, 5), f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done.returncode == 0

    def allowed_s(self, *, nightly: bool) -> float:
        """Return what a run with a mutant may take: several times what one without takes.

        Raises:
            CheckError: The tests fail without a mutant.
        """
        start = time.monotonic()
        name = "nightly" if nightly else "daily"
        check(self.passes(nightly=nightly), f"the {name} tests fail without a mutant: {' '.join(self.files)}")
        return 60 + 5 * (time.monotonic() - start)


def _environment(root: Path) -> dict[str, str]:
    """Return an environment in which dryfit is that of a copy."""
    env = outside({"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"})
    return {key: value for key, value in env.items() if key not in ("DRYFIT_FULL", "DRYFIT_COLD")}


def examine(suite: Suite, module: Path, some: Sequence[Mutant]) -> list[tuple[Mutant, Noticed]]:
    """Run the tests with one mutant after the other in the place of a module of the copy."""
    original = module.read_text("utf-8")
    daily_s, nightly_s = suite.allowed_s(nightly=False), 0.0
    results: list[tuple[Mutant, Noticed]] = []
    for mutant in some:
        module.write_text(mutant.source, "utf-8")
        noticed = Noticed.NEVER
        if not suite.passes(nightly=False, limit_s=daily_s):
            noticed = Noticed.DAILY
        else:
            if not nightly_s:
                module.write_text(original, "utf-8")
                nightly_s = suite.allowed_s(nightly=True)
                module.write_text(mutant.source, "utf-8")
            if not suite.passes(nightly=True, limit_s=nightly_s):
                noticed = Noticed.NIGHTLY
        results.append((mutant, noticed))
        print(f"{noticed}: {module.name}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)
    module.write_text(original, "utf-8")
    return results


def table(results: Mapping[str, Sequence[tuple[Mutant, Noticed]]]) -> str:
    """Return what was noticed by which tests, and the mutants that not all of them noticed."""
    lines = ["| module | mutants | daily | nightly only | neither |", "|---|--:|--:|--:|--:|"]
    rest: list[str] = []
    for name, some in results.items():
        counts = Counter(noticed for _, noticed in some)
        lines.append(f"| `{name}` | {len(some)} | {' | '.join(str(counts[noticed]) for noticed in Noticed)} |")
        rest += [
            f"- {noticed}: `{name}` line {mutant.line}, {mutant.kind}: `{mutant.before}` became `{mutant.after}`"
            for mutant, noticed in some
            if noticed is not Noticed.DAILY
        ]
    return "\n".join([*lines, "", *rest])


def chosen_modules(words: str) -> list[str]:
    """Return the modules that were asked for, all of the table where none was.

    Raises:
        CheckError: A word is no module of the table.
    """
    for word in words.split():
        check(word in TESTS, f"reading MODULES: {word!r} is no module of the table; allowed: {', '.join(TESTS)}")
    return words.split() or list(TESTS)


def number(name: str, default: int, least: int) -> int:
    """Return a number from the environment.

    Raises:
        CheckError: It is none, or too small.
    """
    text = os.environ.get(name) or str(default)
    check(text.isdecimal() and int(text) >= least, f"reading {name}: {text!r} is no whole number of {least} or more")
    return int(text)


def main() -> int:
    """Examine the modules; return 1 where the tests of the night alone notice a mutant."""
    results: dict[str, list[tuple[Mutant, Noticed]]] = {}
    try:
        count, seed = number("MUTANTS", 8, 1), number("SEED", 0, 0)
        modules = chosen_modules(os.environ.get("MODULES", ""))
        with temporary_folder("mutants") as folder:
            copy_sources(folder)
            with (folder / "tests" / "conftest.py").open("a", encoding="utf-8") as file:
                file.write(NO_SHRINKING)
            found = run(
                [sys.executable, "-c", "import dryfit; print(dryfit.__file__)"], cwd=folder, env=_environment(folder)
            )
            check(folder in Path(found.stdout.strip()).parents, f"dryfit is not that of the copy: {found.stdout}")
            for name in modules:
                module = folder / "src" / "dryfit" / name
                some = chosen(mutants(module.read_text("utf-8")), count, seed)
                results[name] = examine(Suite(folder, TESTS[name], seed), module, some)
    except CheckError as error:
        print(f"make mutants: {error}", file=sys.stderr)
        return 1
    print(table(results))
    return int(any(noticed is Noticed.NIGHTLY for some in results.values() for _, noticed in some))


if __name__ == "__main__":
    sys.exit(main())
