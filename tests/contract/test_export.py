"""Exports: what other programs read back is what the ledger says."""

import csv
import math
from datetime import datetime
from pathlib import Path

import optuna
import pandas
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from typer.testing import CliRunner

import dryfit
from dryfit.documents.command_line import app
from dryfit.documents.report_tables import cell_text
from dryfit.settings.choices import Direction
from dryfit.settings.errors import ConfigError
from dryfit.settings.trial import FoldScore, Goal, Outcome
from ledgers import BEGAN_S, begun, eventful

TEXTS = ["plain", 'com,ma "quoted"\nline', "=1+1", "+x", "-x", "@x", "'quoted", "\tx", "ünïcödé 字 🎉", "true", "1e-3"]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def text_of(cell: str) -> str:
    """What a cell of text means."""
    return cell.removeprefix("'")


def test_every_trial_is_a_row_with_what_the_ledger_says(tmp_path: Path) -> None:
    script = eventful()
    path = dryfit.export(script.write(tmp_path / "study"), "csv")
    assert path == tmp_path / "study/report/trials.csv"
    state, rows = script.state(), read(path)
    assert [int(row["number"]) for row in rows] == [trial.number for trial in state.trials]
    for row, trial in zip(rows, state.trials, strict=True):
        assert (row["generation"], row["outcome"]) == ("1", trial.outcome or "")
        assert row["value"] == ("" if trial.value is None else repr(trial.value))
        assert int(row["seed"]) == trial.seed
        assert int(row["attempts"]) == len(trial.attempts)
        assert text_of(row["reason"]) == trial.reason
        drawn = {name[6:]: cell for name, cell in row.items() if name.startswith("param.") and cell}
        assert drawn.keys() == trial.params.keys()
        lr = trial.params["optim.lr"]
        assert isinstance(lr, float)
        assert float(drawn["optim.lr"]) == lr
        assert datetime.fromisoformat(row["asked_at"]).timestamp() == pytest.approx(trial.asked_at_s, abs=1e-3)
        assert (row["finished_at"] == "") == (trial.outcome is None)
        if trial.outcome is Outcome.REFUSED:
            assert int(row["planned_bytes"]) > 2**30
    observed = [row for row in rows if row["observed_bytes"]]
    assert observed and all(0.8 < int(row["observed_bytes"]) / int(row["planned_bytes"]) < 1.1 for row in observed)
    assert datetime.fromisoformat(rows[0]["asked_at"]).timestamp() > BEGAN_S


def odd(folder: Path) -> Path:
    """Values and texts that CSV has trouble with."""
    script = begun(also=[Goal(name="loss", direction=Direction.MINIMIZE)])
    values = [0.1 + 0.2, float("nan"), float("inf"), float("-inf"), -1e-300, 5e-324]
    for number, text in enumerate(TEXTS):
        spaces = {"head.pooling": CategoricalDistribution(TEXTS)}
        script.ask(number, {"head.pooling": text, "x.flag": number % 2 == 0, "x.count": -number}, spaces)
        also = (float("inf"),) if number == 1 else (0.5,)
        script.finish(number, Outcome.COMPLETE, values[number % len(values)], also=also, reason=text)
    script.ask(len(TEXTS), {})
    return script.write(folder)


def test_pandas_reads_the_same_numbers_and_texts(tmp_path: Path) -> None:
    state = dryfit.open_study(odd(tmp_path / "study"))
    path = dryfit.export(tmp_path / "study", "csv", tmp_path / "out.csv")
    types = {"param.head.pooling": str, "reason": str, "param.x.flag": "boolean"}
    frame = pandas.read_csv(path, dtype=types)
    trials = state.trials[: len(TEXTS)]
    for trial, value in zip(trials, frame["value"], strict=False):
        assert trial.value is not None
        assert value == trial.value or (math.isnan(value) and math.isnan(trial.value))
    assert frame["value.loss"][1] == math.inf
    assert [text_of(cell) for cell in frame["param.head.pooling"][: len(TEXTS)]] == TEXTS
    assert [text_of(cell) for cell in frame["reason"][: len(TEXTS)]] == TEXTS
    assert list(frame["param.x.flag"][:2]) == [True, False]
    assert list(frame["param.x.count"][: len(TEXTS)]) == [-number for number in range(len(TEXTS))]
    assert frame["param.head.pooling"].isna().tolist() == [False] * len(TEXTS) + [True]


def test_no_text_begins_like_a_formula_and_numbers_are_left_alone() -> None:
    for text in TEXTS:
        assert not cell_text(text).startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
        assert text_of(cell_text(text)) == text
    assert [cell_text(value) for value in (-1.5, -2, True, None, float("-inf"))] == ["-1.5", "-2", "true", "", "-inf"]


@pytest.mark.parametrize("name", ["optuna.journal", "trials.db"])
def test_optuna_opens_the_export(tmp_path: Path, name: str) -> None:
    script = eventful()
    path = dryfit.export(script.write(tmp_path / "study"), "optuna", tmp_path / name)
    assert [file.name for file in tmp_path.iterdir() if file.name != "study"] == [name]
    rows = RDBStorage(f"sqlite:///{path}") if name.endswith(".db") else None
    storage = rows or JournalStorage(JournalFileBackend(str(path)))
    loaded = optuna.load_study(study_name="made-up", storage=storage)
    state = script.state()
    assert len(loaded.trials) == len(state.trials)
    assert (loaded.best_trial.number, loaded.best_value) == (state.best.number, state.best.value)
    for trial, told in zip(loaded.trials, state.trials, strict=True):
        assert trial.user_attrs["params"] == told.params
        assert list(trial.intermediate_values.values()) == [point.value for point in told.reports]
    assert loaded.trials[-1].state is TrialState.RUNNING
    if rows is not None:
        rows.engine.dispose()


def test_odd_values_reach_optuna_too(tmp_path: Path) -> None:
    path = dryfit.export(odd(tmp_path / "study"), "optuna", f"sqlite:///{tmp_path}/odd")
    assert path == tmp_path / "odd"
    studies = optuna.get_all_study_names(f"sqlite:///{path}")
    assert studies == ["made-up"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = eventful(3).write(tmp_path / "study")
    for to in ("csv", "optuna"):
        path = dryfit.export(folder, to)
        before = path.read_bytes()
        with pytest.raises(ConfigError, match="there is such a file"):
            dryfit.export(folder, to)
        assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="postgresql:// is no file"):
        dryfit.export(folder, "optuna", "postgresql://me:secret@db/x")
    with pytest.raises(ConfigError, match="there is no folder"):
        dryfit.export(folder, "csv", tmp_path / "no/out.csv")
    with pytest.raises(ConfigError, match="csv"):
        dryfit.export(folder, "parquet")


def test_the_command_prints_the_file(tmp_path: Path) -> None:
    folder = eventful(3).write(tmp_path / "study")
    done = CliRunner().invoke(app, ["export", str(folder), "--to", "csv", "-o", str(tmp_path / "x.csv")])
    assert (done.exit_code, done.stdout.strip()) == (0, str(tmp_path / "x.csv"))
    assert CliRunner().invoke(app, ["export", str(folder), "--to", "mlflow"]).exit_code == 2
    assert CliRunner().invoke(app, ["export", str(folder)]).exit_code == 2


def test_exporting_prints_nothing_of_optunas(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = eventful(3).write(tmp_path / "study")
    for name in ("optuna.db", "optuna.journal"):
        dryfit.export(folder, "optuna", tmp_path / name)
    assert not caplog.records


def test_folds_have_columns_of_their_own(tmp_path: Path) -> None:
    script = begun(also=(Goal(name="loss", direction=Direction.MINIMIZE),))
    folds = tuple(FoldScore(value, (1 - value,), 20, 20, 20) for value in (0.5, 0.8))
    script.complete(0, {}, [0.65], also=(0.35,), folds=folds)
    script.ask(1, {})
    script.place(1)
    script.finish(1, Outcome.PRUNED, folds=folds[:1])
    script.complete(2, {}, [0.4], also=(0.6,))
    rows = read(dryfit.export(script.write(tmp_path / "study"), "csv"))
    assert list(rows[0])[3:9] == ["value", "value.loss", "spread", "fold.1", "fold.2", "last_value"]
    assert [(row["spread"], row["fold.1"], row["fold.2"]) for row in rows] == [
        (repr(script.state().trials[0].spreads[0]), "0.5", "0.8"),
        ("", "0.5", ""),
        ("", "", ""),
    ]
