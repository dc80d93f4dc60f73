"""``dryfit check`` as a user meets it: budgets, baselines and what grew by line, with made-up rehearsals."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import dryfit
from dryfit.documents.command_line import app
from dryfit.documents.memory_checks import check_markdown, check_page
from dryfit.settings.device_answers import DeviceAnswer, DeviceAnswers
from dryfit.settings.devices import parse_device
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_check import HeldLine, Kept
from dryfit.settings.memory_terms import DeviceSpec, MemoryCategory, VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer, ScriptEnd
from dryfit.study.memory_checks import CheckOptions, changes, check_runs
from golden import Golden
from rehearsal_stand_in import GIB, answer_of, memory_of
from study_runs import run

Takes = Callable[..., None]
ONE = '[run.one]\ncommand = "train.py --rows 4"\ndevice = "rtx4090"\n'


@pytest.fixture
def takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Takes:
    """Sets what the next rehearsals take of activations, or answer; the last one is that of all further ones."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    coming: list[int | RehearsalAnswer] = [4 * GIB]

    def rehearse(_command: object, _options: object, devices: Sequence[DeviceSpec]) -> DeviceAnswers:
        given = [coming.pop(0) if len(coming) > 1 else coming[0] for _ in devices]
        answers = [
            one if isinstance(one, RehearsalAnswer) else answer_of(one, device)
            for one, device in zip(given, devices, strict=True)
        ]
        return DeviceAnswers(tuple(DeviceAnswer(one, devices[0].name) for one in answers), 1, 1.0)

    def set_next(*given: int | RehearsalAnswer) -> None:
        coming[:] = given

    monkeypatch.setattr("dryfit.study.memory_checks.rehearse_devices", rehearse)
    return set_next


def checked(*words: str, runs: str = ONE) -> Result:
    Path("gpu-memory.toml").write_text(runs, encoding="utf-8")
    return CliRunner().invoke(app, ["check", "--quiet", *words])


def seen(*words: str, runs: str = ONE) -> tuple[int, list[dict[str, object]]]:
    done = checked("--json", *words, runs=runs)
    found = json.loads(done.stdout)
    assert found["exit_status"] == done.exit_code
    return done.exit_code, found["runs"]


def moved(answer: RehearsalAnswer, by: int) -> RehearsalAnswer:
    """The same where each line of the script stands so many lines below."""
    memory = answer.memory
    lines = tuple(one.model_copy(update={"line": f"train.py:{by + n}"}) for n, one in enumerate(memory.by_line))
    return answer.model_copy(update={"memory": memory.model_copy(update={"by_line": lines})})


def test_what_grew_is_told_by_line(takes: Takes, golden: Golden) -> None:
    assert checked("--update").exit_code == 0
    assert checked().exit_code == 0
    takes(moved(answer_of(5 * GIB, parse_device("rtx4090")), 300))
    done = checked()
    assert done.exit_code == 1
    golden("check", done.stdout)
    status, (run,) = seen()
    (line,) = run["lines"]
    assert (line["line"], line["difference_bytes"], line["before_bytes"]) == ("train.py:300", GIB, 4 * GIB)
    assert (status, run["verdict"], run["fits"]) == (1, "grew", True)
    assert run["after"]["allocated_bytes"] - run["before"]["allocated_bytes"] == GIB


def kept(peak: int, *lines: tuple[str, str, int], knows_inner: bool = True) -> Kept:
    """Return what is kept of a peak: lines of one library file by number, code and MiB."""
    held = tuple(
        HeldLine(
            line="train.py:3",
            code="loss = model(ids)",
            source=f"library/model.py:{number}",
            source_code=code if knows_inner else "",
            category=MemoryCategory.ACTIVATIONS,
            bytes=size << 20,
        )
        for number, code, size in lines
    )
    return Kept(allocated_bytes=peak << 20, reserved_bytes=0, required_bytes=0, versions={}, lines=held)


def test_lines_of_a_library_are_told_apart_by_their_code() -> None:
    before = kept(100, ("7", "logits = head(x)", 90), ("8", "x = norm(x)", 10))
    after = kept(180, ("9", "logits = head(x)", 80), ("10", "x = norm(x)", 10), ("11", "x = x.float()", 90))
    found = [(one.source, one.source_code, one.difference_bytes >> 20) for one in changes(before, after)]
    assert found == [("library/model.py:11", "x = x.float()", 90), ("library/model.py:9", "logits = head(x)", -10)]
    assert [one.difference_bytes >> 20 for one in changes(after, before)] == [-90, 10]


def test_a_baseline_without_the_code_of_libraries_compares_their_files() -> None:
    before = kept(100, ("7", "", 100), knows_inner=False)
    (one,) = changes(before, kept(180, ("9", "logits = head(x)", 90), ("11", "x = x.float()", 90)))
    assert (one.before_bytes >> 20, one.after_bytes >> 20, one.source_code) == (100, 180, "")


def test_lines_that_moved_are_no_change(takes: Takes) -> None:
    assert checked("--update").exit_code == 0
    takes(moved(answer_of(4 * GIB, parse_device("rtx4090")), 300))
    status, (run,) = seen()
    assert (status, run["verdict"], run["lines"]) == (0, "within", [])


@pytest.mark.parametrize(
    ("more", "tolerance", "verdict"),
    [
        (60, "1 %", "within"),
        (62, "1 %", "grew"),
        (62, "2%", "within"),
        (1, "0 %", "grew"),
        (-100, "1 %", "less than the baseline"),
    ],
)
def test_the_tolerance_is_that_of_the_peak(takes: Takes, more: int, tolerance: str, verdict: str) -> None:
    runs = f'{ONE}tolerance = "{tolerance}"\n'
    assert checked("--update", runs=runs).exit_code == 0
    takes(4 * GIB + more * 2**20)
    _, (run,) = seen(runs=runs)
    assert run["verdict"] == verdict


def test_a_budget_below_the_device_and_a_device_below_both(takes: Takes) -> None:
    status, (run,) = seen(runs=f'{ONE}budget = "6 GiB"\n')
    assert (status, run["verdict"], run["fits"], run["budget_bytes"]) == (1, "over budget", False, 6 * GIB)
    takes(40 * GIB)
    status, (run,) = seen(runs=f'{ONE}budget = "6 GiB"\n')
    assert (status, run["verdict"], run["fits"]) == (1, "does not fit", False)


def test_each_device_has_its_own_baseline(takes: Takes) -> None:
    runs = ONE.replace('"rtx4090"', '["rtx4090", "a100-80"]')
    takes(4 * GIB, 6 * GIB, 4 * GIB, 6 * GIB)  # each twice
    assert checked("--update", runs=runs).exit_code == 0
    takes(4 * GIB, 7 * GIB)
    status, (first, second) = seen(runs=runs)
    assert (status, first["verdict"], second["verdict"]) == (1, "within", "grew")
    assert set(json.loads(Path(".dryfit/one.json").read_text())["devices"]) == {"rtx4090", "a100-80"}


def test_other_versions_are_named_first(takes: Takes, tmp_path: Path) -> None:
    assert checked("--update").exit_code == 0
    file = Path(".dryfit/one.json")
    file.write_text(file.read_text().replace('"torch": "2.13.0"', '"torch": "2.12.1"'), encoding="utf-8")
    takes(5 * GIB)
    done = checked("--markdown", "found.md")
    lines = done.stdout.splitlines()
    assert "torch 2.12.1 -> 2.13.0" in lines[1] and lines[2].startswith("  allocated")
    _, (run,) = seen()
    assert run["other_versions"] == {"torch": ["2.12.1", "2.13.0"]}
    imports = answer_of(5 * GIB, parse_device("rtx4090")).model_copy(update={"libraries": {"peft": "0.18"}})
    takes(imports)
    assert seen()[1][0]["other_versions"] == {"torch": ["2.12.1", "2.13.0"]}  # one more is no other version
    assert "| one | rtx4090 | **grew** |" in Path("found.md").read_text()


def test_the_page_shows_what_grew_beside_the_timeline(takes: Takes) -> None:
    assert checked("--update").exit_code == 0
    evil = moved(answer_of(5 * GIB, parse_device("rtx4090")), 300)
    memory = evil.memory
    lines = (memory.by_line[0].model_copy(update={"code": "<script>alert(1)</script>"}), *memory.by_line[1:])
    takes(evil.model_copy(update={"memory": memory.model_copy(update={"by_line": lines})}))
    found = check_runs(CheckOptions(on_note=lambda _: None))
    (section,) = check_page(found).sections
    changed, timeline = section.charts
    assert [part["name"] for part in changed["data"]] == ["baseline", "now"]
    assert [sum(part["x"]) for part in changed["data"]] == [sum(one.before_bytes for one in found.runs[0].lines) / GIB,
        sum(one.after_bytes for one in found.runs[0].lines) / GIB]  # fmt: skip
    assert [part["name"] for part in timeline["data"]][:3] == ["allocated", "reserved", "device"]
    assert checked("--html", "found.html").exit_code == 1
    page = Path("found.html").read_text("utf-8")
    assert "train.py:300" in page and "<script>alert" not in page


@pytest.mark.parametrize("option", ["--html", "--markdown"])
def test_a_file_of_another_kind_is_not_replaced(takes: Takes, option: str) -> None:
    takes(4 * GIB)
    Path("mine").write_text("my notes", encoding="utf-8")
    assert isinstance(checked(option, "mine").exception, ConfigError)
    assert Path("mine").read_text("utf-8") == "my notes"
    assert checked(option, "new").exit_code == checked(option, "new").exit_code == 0


FAILED = answer_of(GIB, parse_device("rtx4090")).model_copy(
    update={"end": ScriptEnd.FAILED, "reasons": ("KeyError: 'x'",)}
)
UNKNOWN = {
    "an exception": [FAILED],
    "nothing was seen": [FAILED.model_copy(update={"memory": None})],
    "two bounds": [FAILED.model_copy(update={"end": ScriptEnd.STOPPED, "verdict": VerdictKind.UNKNOWN})],
    "it differs": [5 * GIB, 6 * GIB],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_unknown_is_2_and_no_baseline_comes_of_it(takes: Takes, name: str) -> None:
    given: list[int | RehearsalAnswer] = [*UNKNOWN[name]]
    assert checked("--update").exit_code == 0
    before = Path(".dryfit/one.json").read_bytes()
    takes(*given)
    status, (run,) = seen()
    assert (status, run["verdict"], run["fits"] is None) == (2, "unknown", name != "it differs")
    assert run["reasons"]
    assert "it needs" not in checked().stdout or name == "it differs"
    takes(*given)
    assert checked("--update").exit_code == 2
    assert Path(".dryfit/one.json").read_bytes() == before
    if name == "it differs":
        assert "train.py:88" in str(run["reasons"])


def test_the_baseline_of_another_command_says_nothing(takes: Takes) -> None:
    assert checked("--update").exit_code == 0
    other = ONE.replace("--rows 4", "--rows 8")
    status, (run,) = seen(runs=other)
    assert (status, run["verdict"], run["before"]) == (2, "unknown", None)
    assert "--rows 4" in str(run["reasons"])
    assert checked("--update", runs=other).exit_code == 0
    assert seen(runs=other)[0] == 0


def test_paths_are_those_of_the_file(takes: Takes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fsdp.yaml").write_text("num_processes: 4\n", encoding="utf-8")
    (tmp_path / "gpu-memory.toml").write_text(
        ONE.replace("train.py", "accelerate launch --config_file fsdp.yaml train.py"), encoding="utf-8"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert dryfit.check_memory(file="../gpu-memory.toml", on_note=lambda _: None).runs[0].verdict == "no baseline"
    assert Path.cwd().name == "elsewhere"


def test_names_choose_runs(takes: Takes) -> None:
    runs = ONE + ONE.replace("run.one", "run.two")
    assert [run["name"] for run in seen("two", "two", runs=runs)[1]] == ["two"]
    assert [one.name for one in dryfit.check_memory(["one"], on_note=lambda _: None).runs] == ["one"]
    assert isinstance(checked("tow", runs=runs).exception, ConfigError)


@pytest.mark.parametrize(
    "runs",
    [
        "",
        "run = 3",
        "[run.one]",
        ONE.replace("rtx4090", "rtx4o9o"),
        ONE.replace('"rtx4090"', "[]"),
        ONE.replace('"rtx4090"', '["rtx4090", "rtx4090"]'),
        ONE.replace('"rtx4090"', "2026-11-27"),
        f'{ONE}budget = "20"\n',
        f"{ONE}budget = 20\n",
        f'{ONE}budget = "-1 GiB"\n',
        f'{ONE}tolerance = "1"\n',
        f'{ONE}tolerance = "nan %"\n',
        f"{ONE}steps = 0\n",
        f"{ONE}bugdet = 1\n",
        f"{ONE}{ONE}",
        ONE.replace("run.one", 'run."../out"'),
        ONE.replace("run.one", 'run.""'),
        ONE.replace("--rows 4", "--rows '4"),
        ONE.replace("train.py --rows 4", ""),
        "a = " + "[" * 100_000,
    ],
)
def test_a_file_that_is_wrong_is_refused(takes: Takes, runs: str) -> None:
    done = checked(runs=runs)
    assert isinstance(done.exception, ConfigError)


def test_a_run_of_a_script_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = checked(runs=ONE.replace("train.py", "nothing.py"))
    assert isinstance(done.exception, ConfigError)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2}', '{"a": 1, "a": 2}', "[" * 10_000, '{"format": 1}\x00']
)
def test_a_baseline_that_was_edited_is_refused(takes: Takes, text: str) -> None:
    Path(".dryfit").mkdir()
    Path(".dryfit/one.json").write_text(text, encoding="utf-8")
    done = checked()
    assert isinstance(done.exception, ConfigError)
    assert "--update" in done.exception.hint


def test_code_is_no_markup(takes: Takes) -> None:
    assert checked("--update").exit_code == 0
    answer = answer_of(5 * GIB, parse_device("rtx4090"))
    evil = "x = `rm` | [a](b) <script> @everyone \x1b[31m **b**"
    lines = tuple(one.model_copy(update={"code": evil}) for one in memory_of(5 * GIB).by_line)
    takes(answer.model_copy(update={"memory": answer.memory.model_copy(update={"by_line": lines})}))
    text = check_markdown(dryfit.check_memory(on_note=lambda _: None))
    rows = [line for line in text.splitlines() if "rm" in line]
    assert rows and all(part not in text for part in ("<script>", "@everyone", "\x1b", " `rm`", " [a]"))
    assert {line.replace("\\|", "").count("|") for line in rows} == {7}


@pytest.mark.slow
@pytest.mark.heavy
def test_the_example_is_within_its_baseline_and_a_line_that_takes_more_is_named(tmp_path: Path) -> None:
    """Its baseline is the repository's: the numbers are those of any machine."""
    folder = tmp_path / "gpu_memory"
    shutil.copytree(Path(__file__).parents[2] / "examples" / "gpu_memory", folder)
    words = ("check", "small", "--file", str(folder / "gpu-memory.toml"), "--quiet", "--json")
    done = run(*words)
    assert (done.returncode, json.loads(done.stdout)["runs"][0]["verdict"]) == (0, "within"), done.stdout
    script = folder / "train.py"
    text = script.read_text(encoding="utf-8")
    costs = "cache = torch.zeros(64, 2**20, device=device)\nfor _ in range(arguments.epochs):"
    script.write_text("# moved\n" * 9 + text.replace("for _ in range(arguments.epochs):", costs), encoding="utf-8")
    done = run(*words)
    found = json.loads(done.stdout)["runs"][0]
    assert (done.returncode, found["verdict"]) == (1, "grew")
    first = found["lines"][0]
    assert (first["code"], first["difference_bytes"]) == (costs.splitlines()[0], 2**28)
    assert first["line"] == f"train.py:{text[: text.index('for _ in')].count(chr(10)) + 10}"
    assert len(found["lines"]) == 1
    assert list(found["after"]["versions"]) == ["torch"]  # all that it imports
