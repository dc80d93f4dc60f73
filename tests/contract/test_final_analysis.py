"""A trained model says what it does well and badly: in JSON, in its folder, on its card and on the report's page."""

import json
from pathlib import Path

import pytest

import tiny
import tiny_lms
import trials
from dryfit.settings.training_messages import Analysis, FinalRequest, FinalResult
from dryfit.tasks.analysis import analyse
from dryfit.tasks.scored_rows import FACTS_FILE, RowFacts, read_facts, read_rows, write_facts
from dryfit.training.trial_jobs import final
from study_runs import run, run_here

STUDY = """
[study]
task = "joint"
trials = 1
metric = "combined"

[data]
train = "data/train.jsonl"
validation = "data/validation.jsonl"
test = "data/test.jsonl"

[model]
name = "model"

[train]
epochs = 1
batch_size = 8
max_length = 64

[head]
threshold = "calibrated"

[span]
doc_stride = 16

[search]
mirror = "none"

[execution]
threads = 1
device = "cpu"
"""


@pytest.mark.slow
def test_json_folder_card_and_report_agree(tmp_path: Path) -> None:
    for name, count, start in (("train", 40, 0), ("validation", 24, 40), ("test", 30, 64)):
        tiny.write_jsonl(tmp_path / "data" / f"{name}.jsonl", tiny.rows(count, start=start, groups=6))
    tiny.model(tmp_path / "model")
    (tmp_path / "study.toml").write_text(STUDY, encoding="utf-8")
    tuned = run("tune", tmp_path / "study.toml", "--quiet")
    assert tuned.returncode == 0, tuned.stderr
    trained = run("train", tmp_path, "--trial", "0", "--json")
    assert trained.returncode == 0, trained.stderr
    answer = json.loads(trained.stdout)
    model = Path(answer["folder"])
    analysis = Analysis.model_validate_json((model / "analysis.json").read_bytes())
    assert json.loads(analysis.model_dump_json()) == answer["analysis"]
    assert (analysis.split, analysis.rows, analysis.notes) == ("test", 30, ())
    assert {part.name for part in analysis.criteria} == set(tiny.CRITERIA) and len(analysis.groups) == 6
    for name, value in analysis.overall.scores.items():
        assert answer["test"][name] == pytest.approx(value, abs=1e-5), name
    assert analysis.classes is not None and analysis.spans is not None
    assert sum(map(sum, analysis.classes.confusion)) == 30
    threshold = json.loads((model / "dryfit.json").read_text(encoding="utf-8"))["input"]["fitted"]["class_threshold"]
    assert analysis.classes.curves[0].threshold == threshold
    said = run("train", tmp_path, "--trial", "0").stdout.splitlines()
    assert "the strongest baseline" in said[0] and [said[0]] == answer["judgement"]
    assert {"on test", "Rows with and without a span", "By criterion", "Confusion"} <= set(said), said
    file = read_rows(model.parent / "scored" / "test.jsonl.gz")
    facts = read_facts(tmp_path / "baselines" / FACTS_FILE)
    again = analyse(file.rows, facts, split="test", metric="combined", of=file.of, thresholds=(threshold,))
    assert again == analysis
    card = (model / "README.md").read_text(encoding="utf-8")
    assert "## What it does well and badly" in card and "| rows | answered with a span | answered with none |" in card
    known = json.loads(run_here("status", tmp_path, "--json").stdout)["baselines"]
    first = card.partition("trial 0\n\n")[2]
    assert first.startswith("**In the search it did not beat the strongest baseline") == (not known["beaten"])
    assert f"{known['values'][known['strongest']]:.6f}" in card
    assert run_here("report", tmp_path).returncode == 0
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert f"Trained model {model.parent.name}" in page and "Rows with and without a span" in page
    assert "share that came true" in page and f"answered above {threshold:.4f}" in page


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("generated", [6, 0])
def test_of_a_language_model_answers_or_losses_are_analysed(tmp_path: Path, generated: int) -> None:
    """Without test rows: on validation, which is answered once more."""
    trial = trials.Trial(
        tmp_path,
        encoder=tiny_lms.causal_lm(tmp_path / "qwen2"),
        data=tiny.data(tmp_path / "data", train=16, validation=8),
        study={"task": "causal-lm", "metric": "loss"},
        train={"epochs": 1, "max_length": 160, "batch_size": 8},
        lm={"format": "both", "max_new_tokens": 3, "generate_rows": generated, "answers": "never, always walk"},
        lora={"r": 4},
    )
    rows = [json.loads(line) for line in (tmp_path / "data/validation.jsonl").read_text(encoding="utf-8").splitlines()]
    write_facts(tmp_path / FACTS_FILE, {row["id"]: RowFacts(row["group"], row["criterion"]) for row in rows})
    model = str(tmp_path / "final" / "model")
    request = FinalRequest(
        training=trials.alone(trial.request(), tmp_path / "final"),
        model_dir=model,
        attempt_model_dir=model,
        study="s",
        facts_file=str(tmp_path / FACTS_FILE),
    )
    done = final(request, trials.ScriptedChannel(tmp_path / "final"))
    assert isinstance(done, FinalResult) and done.analysis is not None and done.validation is not None
    analysis, texts = done.analysis, done.analysis.texts
    assert (analysis.split, analysis.rows, analysis.notes) == ("validation", 16, ()) and texts is not None
    assert analysis.overall.scores == pytest.approx(done.validation, rel=1e-4)
    assert sum(part.rows for part in analysis.criteria) == 16
    assert texts.asked == generated and {row.id.split()[0] for row in texts.worst} <= {row["id"] for row in rows}
    losses = [row.values["loss"] for row in texts.worst]
    assert losses and (generated or losses == sorted(losses, reverse=True))
    card = (Path(model) / "README.md").read_text(encoding="utf-8")
    assert "by which its weights were chosen" in card
    assert (f"Of {generated} generated answers" in card) is bool(generated)
