"""Study files that anybody may have written: each is read, or refused with what is wrong; never anything else."""

import random
from pathlib import Path

import pytest

from dryfit.search.space import Space
from dryfit.settings.errors import ConfigError, DryfitError
from dryfit.settings.study_file_reading import load_study_file, load_study_text
from ledgers import eventful
from study_runs import run_here

_DATA = '[data]\ntrain = "train.jsonl"\nvalidation = "validation.jsonl"\n'
_OWN = '[study]\ntask = "objective"\n[objective]\nfunction = "mine:score"\n[space]\n'
_DEEP = 5000
_GOOD = f"""{_DATA}
[study]
name = "mine"
trials = 12
seed = 3
[optim]
lr = 1e-4
[space]
"optim.lr" = {{ low = 1e-5, high = 1e-3, log = true }}
"train.epochs" = [1, 2, 3]
"train.max_length" = [
    {{ choices = [64, 256], when = {{ "train.epochs" = [1, 2] }} }},
    {{ low = 64, high = 128, step = 32, when = {{ "train.epochs" = 3 }} }},
]
[[search.enqueue]]
"optim.lr" = 1e-4
"""


def _chain(length: int) -> str:
    links = [f"p{at} = {{ choices = [0, 1], when = {{ p{at - 1} = 0 }} }}" for at in range(length - 1, 0, -1)]
    return "\n".join([_OWN, *links, "p0 = [0, 1]"])


_FILES = {
    "deep lists": (_DATA + "x = " + "[" * _DEEP + "]" * _DEEP, "nested deeper"),
    "lists a little too deep": (_DATA + "x = " + "[" * 100 + "]" * 100, "nested deeper"),
    "deep tables": (_DATA + "x = " + "{a = " * _DEEP + "1" + "}" * _DEEP, "nested deeper"),
    "a long key": (_DATA + ".".join("a" * _DEEP) + " = 1", "nested deeper"),
    "a long name of a table": ("[" + ".".join("a" * _DEEP) + "]", "nested deeper"),
    "5 000 digits": ("[study]\nseed = " + "9" * 5000, "thousands of digits"),
    "4 000 digits": ("[study]\nseed = " + "9" * 4000, "integer of 13288 bits"),
    "hexadecimal digits": ("[study]\nseed = 0x" + "f" * 5000, "integer of 20000 bits"),
    "a NUL": ('[data]\ntrain = "a\\u0000b"', "NUL"),
    "an infinite width": (_OWN + "x = { low = -1.7e308, high = 1.7e308 }", "no finite number"),
    "an infinite bound": (_OWN + "x = { low = 0.0, high = inf }", "x.high is Infinity"),
    "steps past counting": (_OWN + "x = { low = 0.0, high = 1.0, step = 1e-300 }", "steps"),
    "too many choices": (_OWN + f"x = {list(range(100_000))}", "100000 choices, and at most 1000"),
    "too many cases": (_OWN + "x = [" + "{ choices = [1, 2] }," * 2000 + "]", "2000 cases, and at most 100"),
    "too many keys": (_OWN + "\n".join(f"x{number} = [1, 2]" for number in range(20_000)), "20000 keys"),
    "a long chain": (_chain(900), "more than 64 conditions"),
    "unknown keys": (_DATA + "[study]\n" + "\n".join(f"tril{number} = 1" for number in range(20_000)), "50 problems"),
}


@pytest.mark.parametrize("name", _FILES)
def test_a_hostile_study_file_is_refused_in_words(tmp_path: Path, name: str) -> None:
    text, found = _FILES[name]
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=found) as caught:
        Space.from_config(load_study_file(path).config)
    assert len(str(caught.value)) < 20_000


def test_what_is_in_bounds_is_read(tmp_path: Path) -> None:
    def space(text: str) -> Space:
        return Space.from_config(load_study_text(text, tmp_path / "study.toml").config)

    assert len(space(_chain(60)).params) == 60
    (listed,) = space(_OWN + f"x = {list(range(1000))}").params
    assert listed.contains(999) and not listed.contains(1000)
    assert space(_OWN + "x = { low = -8e307, high = 8e307 }").params[0].contains(0.0)
    assert len(space(_GOOD).params) == 4


@pytest.mark.parametrize("override", ['study.name="\udced"', '"\ud800".x=1', 'objective.function="\udfff"'])
def test_an_override_that_is_no_text_is_refused_in_words(tmp_path: Path, override: str) -> None:
    """As the shell's bytes that are no UTF-8 come."""
    with pytest.raises(ConfigError, match="UTF-8"):
        load_study_text(_DATA, tmp_path / "study.toml", [override])


@pytest.mark.parametrize("override", ["study.seed=" + "9" * 5000, "x.y=" + "[" * _DEEP, ".".join("a" * _DEEP) + "=1"])
def test_a_hostile_override_is_refused_in_words(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        load_study_text(_DATA, tmp_path / "study.toml", [override])


def test_a_mutated_study_file_is_read_or_refused(tmp_path: Path) -> None:
    made = random.Random(11)
    words = ["[", "]", "{", "}", '"', "'", "=", ".", ",", "\n", "inf", "nan", "-", "1e308", "9" * 5000, "[" * 500]
    words += ["0x" + "f" * 99, "true", "1979-05-27", '"\\u0000"', "[[", "]]", "\x00", "low", "when", "space", "{}", "#"]
    wrong: list[str] = []
    for _ in range(600):
        text = _GOOD
        for _ in range(made.randrange(1, 4)):
            at, until = sorted(made.randrange(len(text) + 1) for _ in range(2))
            tail = made.choice([text[at:], text[min(until, at + 9) :], text[at + 1 :]])
            text = text[:at] + made.choice([*words, text[at:until][:40]]) + tail
        try:
            Space.from_config(load_study_text(text, tmp_path / "study.toml").config)
        except DryfitError:
            continue
        except Exception as error:
            wrong.append(f"{error!r}: {text}")
    assert not wrong


def test_commands_that_look_run_no_code_of_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, ran = tmp_path / "study", tmp_path / "ran"
    script = eventful()
    study.mkdir()
    lines = "".join(f"{event.model_dump_json()}\n" for event in script.events)
    (study / "ledger.jsonl").write_text(lines, encoding="utf-8")
    (study / "study.toml").write_text(
        '[study]\ntask = "objective"\n[objective]\nfunction = "evil.py:score"\n[space]\nx = [1, 2]\n', encoding="utf-8"
    )
    for name in ("evil", "conftest", "sitecustomize", "usercustomize", "dryfit"):
        (study / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\n", encoding="utf-8")
    monkeypatch.chdir(study)
    for words in (["status"], ["status", "--json"], ["show"], ["show", "0"], ["report"], ["export", "--to", "csv"]):
        done = run_here(words[0], study, *words[1:])
        assert done.returncode == 0, done.stderr
    assert run_here("stop", study).returncode == 1, "nobody runs it"
    assert not ran.exists()
