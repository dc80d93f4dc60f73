"""A built-in task is one row and one class: no other source file names it."""

import ast
from pathlib import Path

from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.task_facts import BUILT_IN

SRC = Path(__file__).resolve().parents[1] / "src"
ROWS = "dryfit.core.settings.task_facts"
NAMES = "dryfit.core.settings.choices"
CLASSES = {row.implementation for row in BUILT_IN.values() if row.implementation}
# Modules that may name the class of another module, each with its reason.
PARTS = {"dryfit.tasks.joint.class_and_span": {"dryfit.tasks.spans.evidence:EvidenceTask"}}  # spans are a part of it


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def named(text: str, module: str) -> set[str]:
    """Members of the enum, and classes of tasks, that a source file names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in BuiltInTask.__members__:
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name == BuiltInTask.__name__:
                found.add(f"{name}.{node.attr}")
        names = {getattr(node, "id", None), getattr(node, "attr", None)}
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
        for implementation in CLASSES - PARTS.get(module, set()):
            home, _, qualname = implementation.partition(":")
            if qualname in names and home != module:
                found.add(qualname)
    return found


def test_no_other_file_names_a_task():
    files = {module_of(path): path.read_text("utf-8") for path in sorted(SRC.rglob("*.py"))}
    words = (BuiltInTask.__name__, *(implementation.partition(":")[2] for implementation in CLASSES))
    likely = {module: text for module, text in files.items() if any(word in text for word in words)}
    found = {module: names for module, text in likely.items() if (names := named(text, module))}
    assert set(found) == {ROWS, NAMES}, found
    assert found[ROWS] == {f"BuiltInTask.{name}" for name in BuiltInTask.__members__}
    assert PARTS.keys() <= files.keys()
