"""What notebooks and terminals show of dryfit's objects: everything escaped, and pandas needed only for the frame."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dryfit
import ledgers
from dryfit.documents.document import Document, Line
from dryfit.settings.errors import ConfigError, LedgerError, MachineError
from dryfit.settings.text import Shown, Table
from dryfit.settings.trial import Scalar

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e&\"'"


def study(folder: Path, value: str = "mean", trials: int = 3) -> Path:
    params: dict[str, Scalar] = {"head.pooling": value, "optim.lr": 0.5}
    return ledgers.done(folder, *(0.5 + number / 1000 for number in range(trials)), params=params)


def test_texts_are_escaped_in_html_and_in_print() -> None:
    document = Document((HOSTILE, HOSTILE, Line(HOSTILE, "red"), Table((HOSTILE,), ((HOSTILE,),))))
    html, text = document.html(), str(document)
    assert "<script>" not in html and html.count("&lt;script&gt;") == 5
    for shown in (html, text):
        assert "\x1b" not in shown and "\u202e" not in shown
    assert text.count("<script>") == 5  # a terminal runs no script


def test_a_study_and_its_parts_are_shown(tmp_path: Path) -> None:
    at_hand = dryfit.Study(study(tmp_path / "s", value="<i>mean</i>"))
    for shown in (at_hand, at_hand.summary, at_hand.trial(1), at_hand.report()):
        html = shown._repr_html_()
        assert html is not None and html.startswith('<div class="dryfit">') and "<i>" not in html
        assert str(shown)
    assert "trial 1: complete" in str(at_hand.trial(1)) and "&lt;i&gt;mean" in (at_hand._repr_html_() or "")
    assert at_hand.report().file == at_hand.folder / "report" / "index.html"
    assert repr(at_hand) == f"Study({str(at_hand.folder)!r})"
    with pytest.raises(LedgerError, match="none"):
        dryfit.Study(tmp_path / "nowhere")


def test_a_long_study_shows_its_last_trials(tmp_path: Path) -> None:
    html = dryfit.Study(study(tmp_path / "s", trials=70))._repr_html_() or ""
    assert "the last 50 of 70 trials" in html and html.count("<tr>") == 51


def test_trials_are_a_data_frame(tmp_path: Path) -> None:
    frame = dryfit.Study(study(tmp_path / "s")).trials
    assert list(frame.index) == [0, 1, 2]
    assert list(frame["value"]) == [0.5, 0.501, 0.502]
    assert set(frame["param.head.pooling"]) == {"mean"}


def test_without_pandas_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MachineError, match="pip install pandas"):
        _ = dryfit.Study(study(tmp_path / "s")).trials


def test_watching_prints_where_there_is_no_notebook_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, dryfit\n"
        f"dryfit.Study({str(study(tmp_path / 's'))!r}).watch()\n"
        "assert not {'torch', 'pandas', 'IPython'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "3 complete" in done.stdout and "nobody runs this study now" in done.stdout


def test_what_nobody_registered_is_shown_as_ever() -> None:
    class Plain(Shown):
        def __repr__(self) -> str:
            return "Plain()"

    assert Plain()._repr_html_() is None and str(Plain()) == "Plain()"


def test_a_task_is_named_by_its_text(tmp_path: Path) -> None:
    assert dryfit.init(tmp_path / "new", task="criteria")[0].name == "study.toml"
    with pytest.raises(ConfigError, match="no task 'nothing'"):
        dryfit.init(tmp_path / "other", task="nothing")
