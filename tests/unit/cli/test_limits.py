"""Study files beyond the limits that docs/search.md states: each is an error at once, with exit status 2."""

import json
from pathlib import Path

import pytest

from study_runs import run_here

HEAD = '[study]\ntask = "objective"\n[objective]\nfunction = "nowhere:function"\n'


def space(**keys: object) -> str:
    """A study file whose ``[space]`` has these keys."""
    return HEAD + "[space]\n" + "".join(f"{name} = {toml(value)}\n" for name, value in keys.items())


def toml(value: object) -> str:
    """A value as TOML has it, for the few kinds that are written here."""
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
        case _:
            return json.dumps(value)


def chain(length: int) -> dict[str, object]:
    first: dict[str, object] = {"k0": ["a", "b"]}
    return first | {f"k{n}": [{"choices": ["a", "b"], "when": {f"k{n - 1}": "a"}}] for n in range(1, length + 1)}


def cases(count: int) -> dict[str, object]:
    values = [f"v{index}" for index in range(count)]
    return {"parent": values, "child": [{"choices": [1, 2], "when": {"parent": value}} for value in values]}


LIMITS = {
    "1 MiB": (HEAD + "#" * (1 << 20), "larger than 1048576 bytes"),
    "64 levels": (HEAD + "[space]\nx = " + "[" * 65 + "]" * 65, "nested"),
    "digits of a number": (HEAD + f"[space]\nx = [{'9' * 5000}]", "study.toml"),
    "bits of a number": (HEAD + f"[space]\nx = [{2**63}]", "64"),
    "searched keys": (space(**{f"k{index}": [1, 2] for index in range(1001)}), "1000"),
    "choices": (space(x=list(range(1001))), "1000"),
    "cases": (space(**cases(101)), "100"),
    "conditions in a row": (space(**chain(65)), "64"),
    "conditions in a row, the last key first": (space(**dict(reversed(chain(65).items()))), "64"),
    "a range without end": (space(x={"low": -1.7e308, "high": 1.7e308}), "x"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_study_file_beyond_a_limit_is_refused_at_once(name: str, tmp_path: Path) -> None:
    text, words = LIMITS[name]
    file = tmp_path / "study.toml"
    file.write_text(text, encoding="utf-8")
    done = run_here("tune", file, "--quiet")
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr and words in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr) < 2000
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


@pytest.mark.parametrize(
    "keys",
    [{f"k{index}": [1, 2] for index in range(1000)}, cases(100), chain(64), dict(reversed(chain(64).items()))],
)
def test_a_study_file_at_its_limits_is_read(keys: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(space(**keys), encoding="utf-8")
    done = run_here("tune", file, "--quiet")
    assert done.returncode == 2 and "[OBJECTIVE]" in done.stderr, "all but its function was found in order"
