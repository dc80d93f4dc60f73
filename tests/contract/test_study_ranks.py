"""A real study of two models under a limit that the larger one does not fit: that one is sharded, the other is not."""

import json
from pathlib import Path

import pytest

import tiny
from dryfit.processes.node import available_cores
from dryfit.settings.memory_terms import VerdictKind
from study_runs import fold, run

STUDY = """
[study]
trials = 2
seed = 5

[data]
train = "{data}/train.jsonl"
validation = "{data}/validation.jsonl"

[model]
name = "{small}"

[train]
epochs = 2
batch_size = 8
max_length = 32

[optim]
name = "sgd"
lr = 0.05

[head]
dropout = 0.0

[regularization]
dropout = 0.0
attention_dropout = 0.0

[space]
"model.name" = ["{small}", "{large}"]

[search]
sampler = "random"
mirror = "none"

[[search.enqueue]]
"model.name" = "{large}"

[execution]
threads = 1
micro_batch = 8
eval_batch = 8
checkpointing = false
optimizer_impl = "fused"
memory_limit = "{limit_bytes}B"
tp = {tp}
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(available_cores() < 2, reason="each rank needs a core of its own")
def test_the_large_model_is_cut_and_learns_what_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small, large = tiny.model(tmp_path / "small"), tmp_path / "large"
    tiny.model(large, hidden_size=256, intermediate_size=1024, num_attention_heads=4)
    data = tmp_path / "data"
    tiny.data(data, train=48, validation=32, seed=3)

    def study(name: str, limit_bytes: int, tp: str) -> Path:
        (tmp_path / name).mkdir()
        text = STUDY.format(data=data, small=small, large=large, limit_bytes=limit_bytes, tp=tp)
        (tmp_path / name / "study.toml").write_text(text, encoding="utf-8")
        return tmp_path / name

    whole = study("whole", 8 * 2**30, "1")
    done = run("tune", whole, "--quiet")
    assert done.returncode == 0, done.stderr
    needs = {}
    for trial in fold(whole).trials:
        assert trial.plan is not None and trial.plan.answer.memory is not None
        needs[trial.params["model.name"]] = trial.plan.answer.memory.required_bytes
    assert set(needs) == {str(small), str(large)}

    tight = study("tight", needs[str(large)] - 1000, '"auto"')
    done = run("tune", tight, "--quiet")
    assert done.returncode == 0, done.stderr
    for cut, alone in zip(fold(tight).trials, fold(whole).trials, strict=True):
        is_large = cut.params["model.name"] == str(large)
        assert cut.params == alone.params and cut.plan is not None and cut.plan.execution is not None
        assert cut.plan.execution.tp == (2 if is_large else None)
        assert (cut.plan.answer.sharding is not None) is is_large
        assert cut.value == pytest.approx(alone.value, abs=1e-4)
        assert [one.metrics for one in cut.reports] == [pytest.approx(one.metrics, abs=1e-4) for one in alone.reports]
        asked = json.loads((tight / "trials" / f"{cut.number:04d}" / "attempt-1" / "request.json").read_text())
        assert asked["body"]["plan"]["tp"] == (2 if is_large else 1)
        shown = run("show", tight, str(cut.number)).stdout
        assert ("run with tensor parallelism over 2 ranks, micro-batch 8 x 1" in shown) is is_large

    looked = run("tune", tight, "--dry-run", "--set", f"model.name={large}")
    assert "by each of 2 ranks that its model is sharded over" in looked.stdout, looked.stdout + looked.stderr

    refused = study("refused", needs[str(large)] - 1000, "1")
    done = run("tune", refused, "--quiet")
    assert done.returncode == 0, done.stderr
    trials = [one for one in fold(refused).trials if one.plan is not None]
    reasons = [one.reason for one in trials if one.plan and one.plan.answer.verdict is VerdictKind.REFUSED]
    assert reasons and all("would fit: execution.tp = 2 (" in reason for reason in reasons)
