"""The page of a report: it loads nothing, runs nothing but its own scripts, and has a sentence for every state."""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dryfit
from dryfit.documents.command_line import app
from dryfit.ledger.ledger import StudyLock
from dryfit.settings.choices import Direction
from dryfit.settings.errors import Action, ConfigError, FailureKind, LedgerError
from dryfit.settings.study_file_reading import load_study_file, load_study_text
from dryfit.settings.study_file_text import dump_toml
from dryfit.settings.trial import Goal, Outcome
from ledgers import Script, begun, eventful

STUDY = """
[study]
name = "made-up"
metric = "f1_macro"
seed = 7

[data]
train = "train.jsonl"
validation = "validation.jsonl"

[loss]
{loss}

[space]
"optim.lr" = {{low = 1e-6, high = 1e-3, log = true}}
"head.pooling" = ["cls", "mean", "max"]
"loss.name" = ["cross_entropy", "focal"]

[search]
mirror = "env:OPTUNA_SECRET_URL"
"""


@dataclass
class Document(HTMLParser):
    """What a browser would make of the page: tags with their attributes, scripts, and the text of all else."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    text: str = ""
    inside: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all such tags."""
        return [attributes for name, attributes in self.tags if name == tag]


def parsed(path: Path) -> Document:
    document = Document()
    document.feed(path.read_text(encoding="utf-8"))
    document.close()
    return document


def study(folder: Path, script: Script, loss: str = "") -> Path:
    """A study's folder with its ledger and what it was run with."""
    script.write(folder)
    file = folder / "study.toml"
    file.write_text(STUDY.format(loss=loss), encoding="utf-8")
    frozen = dump_toml(load_study_file(file).config, folder)
    (folder / "frozen.toml").write_text(frozen, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Document:
    return parsed(dryfit.write_report(study(tmp_path_factory.mktemp("study"), eventful())))


def test_the_page_asks_for_nothing_outside_itself(page: Document) -> None:
    loading = ("src", "srcset", "data", "poster", "action", "background", "xlink:href")
    assert not [(tag, attributes) for tag, attributes in page.tags if set(loading) & set(attributes)]
    links = [attributes.get("href") or "" for _, attributes in page.tags if "href" in attributes]
    assert links and all(link.startswith("#") for link in links)
    assert not {"link", "iframe", "object", "embed", "base", "img", "video"} & {tag for tag, _ in page.tags}
    policy = next(one["content"] for one in page.named("meta") if one.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none';")
    assert "http" not in policy


def test_the_policy_allows_exactly_the_scripts_of_the_page(page: Document) -> None:
    policy = next(one["content"] for one in page.named("meta") if one.get("http-equiv"))
    allowed = re.findall(r"'(sha256-[^']+)'", str(policy))
    kinds = [attributes.get("type") for attributes in page.named("script")]
    assert kinds == ["application/json", None, None]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts[1:]]
    assert allowed == [f"sha256-{one}" for one in hashes]
    assert "unsafe-inline" not in str(policy).split("script-src")[1].split(";")[0]


def test_every_figure_has_its_place_and_every_link_its_section(page: Document) -> None:
    figures = json.loads(page.scripts[0])
    places = [int(attributes["data-figure"] or "") for _, attributes in page.tags if "data-figure" in attributes]
    assert places == list(range(len(figures)))
    assert len(figures) >= 8
    anchors = {f"#{attributes['id']}" for attributes in page.named("section") if "id" in attributes}
    assert {attributes["href"] for attributes in page.named("a")} == anchors
    for section in ("best", "history", "importance", "curves", "outcomes", "timeline", "refused", "memory", "facts"):
        assert f"#{section}" in anchors


def test_the_page_says_what_the_study_did(page: Document) -> None:
    for part in (
        "of one seed each",
        "Only 28 complete trials are behind these numbers",
        "native_crash",
        "SIGSEGV in the first step",
        "2 sessions of work",
        "d0d0cafe",
        "0: 600, 1: 200",
        "transformers",
        "ended 1 process(es) that an earlier run left behind",
        "not closed: running, or killed",
        "needs 1.2 GiB",
        "largest observed / planned",
    ):
        assert part in page.text, part


EVIL = "</script></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}<!--"


def test_text_of_the_study_stays_text(tmp_path: Path) -> None:
    script = begun(name=EVIL, metric=EVIL)
    for number in range(9):
        script.ask(number, {EVIL: EVIL if number % 2 else "x", "optim.lr": 1e-4 * (number + 1)})
        script.place(number, device=EVIL)
        script.report(number, 0, number / 20)
        script.fail(number, 1, FailureKind.USER_CODE, EVIL, Action.RETRY)
        script.finish(number, Outcome.COMPLETE, number / 20, reason=EVIL)
    script.open((EVIL,))
    document = parsed(dryfit.write_report(study(tmp_path / "study", script)))
    assert len(document.named("script")) == 3
    assert not document.named("img")
    assert not [attributes for _, attributes in document.tags if any(name.startswith("on") for name in attributes)]
    assert document.text.count(EVIL) >= 12
    assert "alert(1)" in document.scripts[0]  # in the figures' JSON, which reads as it was written
    assert "<" not in document.scripts[0]
    assert "&lt;/script&gt;" in json.dumps(json.loads(document.scripts[0]))


def test_the_best_configuration_is_a_study_file(tmp_path: Path) -> None:
    script = begun()
    script.complete(0, {"optim.lr": 1e-5, "head.pooling": "mean", "loss.name": "focal"}, [0.6])
    script.complete(1, {"optim.lr": 3.0000000000000004e-5, "head.pooling": "max", "loss.name": "cross_entropy"}, [0.7])
    folder = study(tmp_path / "study", script, "gamma = 3.5")
    document = parsed(dryfit.write_report(folder))
    text = document.text[document.text.index("# Trial 1 of study") :]
    text = text[: text.index("Optimisation history")]
    config = load_study_text(text, tmp_path / "elsewhere" / "copy.toml").config
    assert config.space == {}
    assert config.optim.lr == 3.0000000000000004e-5
    assert (config.head.pooling, config.loss.name) == ("max", "cross_entropy")
    assert config.loss.gamma == 2.0  # the study's own 3.5 is read by focal alone, and would be refused
    assert config.data.train == str(folder / "train.jsonl")
    assert (config.study.name, config.study.trials, config.study.seed) == ("made-up-best", 1, 7)
    assert "secret" not in (folder / "report/index.html").read_text(encoding="utf-8")


def test_without_its_configuration_a_study_still_has_a_report(tmp_path: Path) -> None:
    script = begun()
    script.complete(0, {"optim.lr": 1e-5}, [0.6])
    document = parsed(dryfit.write_report(script.write(tmp_path / "study")))
    assert "It cannot be written as a study file" in document.text
    assert "there is no such file" in document.text
    odd = begun()
    odd.complete(0, {"my.own": 3}, [0.6])
    assert "It cannot be written as a study file" in parsed(dryfit.write_report(study(tmp_path / "odd", odd))).text


def only(outcome: Outcome) -> Script:
    script = begun()
    for number in range(3):
        script.ask(number, {"train.batch_size": 32, "train.max_length": 40000})
        if outcome is Outcome.REFUSED:
            script.plan(number, {"train.batch_size": 32, "train.max_length": 40000})
        else:
            script.place(number)
            script.fail(number, 1, FailureKind.CONFIG, "no", Action.GIVE_UP)
        script.finish(number, outcome, reason="no")
    return script


def nan() -> Script:
    script = begun()
    script.complete(0, {"optim.lr": 1e-4}, [float("nan")])
    script.complete(1, {"optim.lr": 1e-3}, [float("inf")])
    return script


def running() -> Script:
    script = begun()
    script.ask(0, {"optim.lr": 1e-4})
    script.place(0)
    return script


def one() -> Script:
    script = begun()
    script.complete(0, {}, [0.5])
    return script


def several_goals() -> Script:
    script = begun(also=[Goal(name="loss", direction=Direction.MINIMIZE)])
    for number, (value, loss) in enumerate([(0.6, 0.5), (0.7, 0.6), (0.5, 0.7)]):
        script.ask(number, {})
        script.finish(number, Outcome.COMPLETE, value, also=(loss,))
    return script


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (begun(), ["This study has no trial yet.", "Versions, seeds and data"]),
        (only(Outcome.FAILED), ["No trial has a result: of 3 trials 3 failed.", "Failed attempts by kind"]),
        (
            only(Outcome.REFUSED),
            ["3 refused", "3 trials with 1 different memory plan never started", "1250.0 GiB"],
        ),
        (one(), ["Trial 0 has the best f1_macro, 0.5000", "there is nothing to compare it with"]),
        (nan(), ["No trial has a result", "2 trials completed without a finite f1_macro"]),
        (running(), ["1 not finished", "One bar is one process"]),
        (several_goals(), ["The Pareto front has 2 trials", "No other complete trial is as good"]),
    ],
    ids=["empty", "failures", "refusals", "one", "nan", "running", "goals"],
)
def test_every_state_of_a_study_has_its_sentences(tmp_path: Path, script: Script, said: list[str]) -> None:
    document = parsed(dryfit.write_report(study(tmp_path / "study", script)))
    for part in said:
        assert part in document.text, part
    assert isinstance(json.loads(document.scripts[0]), list)


def test_a_running_study_is_reported_without_its_lock(tmp_path: Path) -> None:
    folder = study(tmp_path / "study", eventful(6))
    with (folder / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"seq": 99999, "torn')
    with StudyLock(folder / "lock"):
        assert "running now" in parsed(dryfit.write_report(folder)).text
    assert "not running" in parsed(dryfit.write_report(folder)).text


def test_a_report_replaces_reports_alone(tmp_path: Path) -> None:
    folder = study(tmp_path / "study", begun())
    target = tmp_path / "page.html"
    assert dryfit.write_report(folder, target) == target
    assert dryfit.write_report(folder, target) == target
    mine = tmp_path / "mine.toml"
    mine.write_text("[study]", encoding="utf-8")
    with pytest.raises(ConfigError, match="no report of dryfit"):
        dryfit.write_report(folder, mine)
    assert mine.read_text(encoding="utf-8") == "[study]"
    with pytest.raises(ConfigError, match="there is a folder"):
        dryfit.write_report(folder, tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        dryfit.write_report(folder, tmp_path / "no" / "page.html")
    with pytest.raises(LedgerError, match="there is none"):
        dryfit.write_report(tmp_path)


def test_the_command_prints_the_file_and_opens_it_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = study(tmp_path / "study", begun()), []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or len(opened) == 1)
    runner = CliRunner()
    quiet = runner.invoke(app, ["report", str(folder)])
    assert (quiet.exit_code, quiet.stdout.strip(), opened) == (0, str(folder / "report/index.html"), [])
    shown = runner.invoke(app, ["report", str(folder), "--open", "-o", str(tmp_path / "page.html")])
    assert (shown.exit_code, opened) == (0, [(tmp_path / "page.html").as_uri()])
    failed = runner.invoke(app, ["report", str(folder), "--open"])
    assert (failed.exit_code, failed.stderr.strip()) == (0, "no browser could be opened")


@pytest.mark.slow
def test_a_report_on_thousands_of_trials_stays_small(tmp_path: Path) -> None:
    path = dryfit.write_report(study(tmp_path / "study", eventful(5000)))
    assert path.stat().st_size < 15e6
    document = parsed(path)
    assert "60 of" in document.text
    assert "dryfit export --to csv writes all" in document.text
