"""What `make wheel-test` looks for in archives and in pyright's answer, and that it can find it."""

import ast
from pathlib import Path

import dryfit
from wheel_test import sdist_faults, type_faults, wheel_faults

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "dryfit/__init__.py",
    "dryfit/py.typed",
    "dryfit/meta/loading/catalogue.json",
    "dryfit/starter/presets/smoke.toml",
    *(f"dryfit/reporting/page.{end}" for end in ("html", "css", "js")),
    "dryfit/train/export/model_card.md.jinja",
    *(f"dryfit/train/export/{model}_example.py.jinja" for model in ("encoder", "lm")),
}
METADATA = {f"dryfit-1.0.dist-info/{name}" for name in ("METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE")}


def test_a_whole_wheel_has_no_faults():
    assert wheel_faults(SOURCES | METADATA | {"dryfit-1.0.dist-info/WHEEL"}, SOURCES) == []


def test_each_file_that_a_wheel_or_an_sdist_lacks_or_has_too_many_is_named():
    for name in SOURCES | METADATA:
        assert any(name.partition("/")[2] in fault for fault in wheel_faults((SOURCES | METADATA) - {name}, SOURCES))
    for name in SOURCES - {"dryfit/__init__.py"}:  # lost from the repository and from the wheel alike
        assert wheel_faults((SOURCES | METADATA) - {name}, SOURCES - {name})
    for name in ("dryfit/left_over.py", "tests/test_a.py", "other/__init__.py", "setup.py"):
        (fault,) = wheel_faults(SOURCES | METADATA | {name}, SOURCES)
        assert fault.startswith(f"{name} is ")
    whole = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", *(f"src/{name}" for name in SOURCES)}
    assert sdist_faults(whole, SOURCES) == []
    assert sdist_faults(whole - {"src/dryfit/py.typed"}, SOURCES) and sdist_faults(whole | {"tests/a.py"}, SOURCES)


def diagnostic(line: int, rule: str) -> dict[str, object]:
    return {"file": "/x/a.py", "rule": rule, "message": "what it says", "range": {"start": {"line": line - 1}}}


def test_pyright_must_report_the_marked_lines_and_no_other():
    program = {"a.py": "import x\nx.wrong()  # wrong: reportCallIssue\n"}
    assert type_faults([diagnostic(2, "reportOther"), diagnostic(2, "reportCallIssue")], program) == []
    assert type_faults([], program) == ["a.py:2: pyright does not say reportCallIssue: None"]
    assert "['reportOther']" in type_faults([diagnostic(2, "reportOther")], program)[0]
    unmarked = [diagnostic(1, "reportUnknownMemberType"), diagnostic(2, "reportCallIssue")]
    assert type_faults(unmarked, program) == ["a.py:1: what it says"]


def test_the_program_uses_every_public_name_and_the_wrong_one_is_wrong_in_many_ways():
    tree = ast.parse((ROOT / "tests" / "wheel" / "consumer.py").read_text("utf-8"))
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dryfit"
    }
    assert used == set(dryfit.__all__)
    assert (ROOT / "tests" / "wheel" / "wrong_consumer.py").read_text("utf-8").count("  # wrong: ") > 5
