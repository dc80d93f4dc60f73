"""A checkpoint's health, and where a trial's weights came from, as rows of text."""

from pathlib import Path

import pytest

from dryfit.core.jobs.checkpoint_health import Adapter, Health, Stored, StoredFile, Subject
from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.wire import write_model
from dryfit.reporting.data.story import trial_story
from dryfit.reporting.terminal.health_table import health_table, health_verdict, size_text
from dryfit.reporting.terminal.story_text import story_lines
from dryfit.store.layout import StudyLayout
from ledgers import Script


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1_000, "1 kB"), (98_552, "98.6 kB"), (1.3406e9, "1.34 GB")]
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def test_long_lists_end_with_a_count() -> None:
    shards = tuple(StoredFile(name=f"s{number}", size_bytes=10, tensors=1) for number in range(20))
    stored = Stored(format="safetensors", files=shards, tensors=20, total_bytes=80, bytes_by_dtype={"float16": 80})
    health = Health(
        folder="f",
        subject=Subject.MODEL,
        healthy=False,
        stored=stored,
        missing=tuple(f"w{number}" for number in range(15)),
        strays=("x",),
        unexpected=tuple("abcdefg"),
    )
    rows = health_table(health).rows
    assert ("shard", "and 8 more") in rows
    assert ("weights", "20 tensors, 80 B (80 B in float16), safetensors") in rows
    assert ("missing", "w11") in rows and ("missing", "w12") not in rows
    assert ("missing", "and 3 more") in rows
    assert ("not used", "7: a, b, c, d, e, and 2 more") in rows
    assert health_verdict(health) == "not healthy: 15 missing, 1 without a place"


def test_verdicts() -> None:
    healthy = Health(folder="f", subject=Subject.MODEL, healthy=True, task="causal-lm")
    assert 'dryfit.load("f", task="causal-lm")' in health_verdict(healthy)
    adapter = Adapter(kind="LORA", base="", layers=2, rank=8)
    health = Health(folder="f", subject=Subject.ADAPTER, healthy=True, adapter=adapter)
    assert "its pairs are complete" in health_verdict(health)
    assert {("adapter", "LORA, rank 8, 2 layers"), ("base model", "not named")} <= set(health_table(health).rows)
    broken = Health(folder="f", subject=Subject.MODEL, healthy=False, errors=("it is cut short",))
    assert health_verdict(broken) == "not healthy: it cannot be opened"


def test_a_trial_s_story_tells_where_its_weights_came_from(tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    script = Script()
    script.begin()
    script.ask(0, {})

    def story() -> list[str]:
        return story_lines(trial_story(script.state(), 0, script.events, layout))

    file = layout.trial(0).load_report
    file.parent.mkdir(parents=True)
    assert not [line for line in story() if "loaded" in line]
    report = LoadReport(
        from_file={"a": "bert.a", "b": "bert.b"}, random=("head.weight",), casts={"bfloat16 to float32": 2}
    )
    write_model(file, report)
    told = story()
    assert "  loaded: 2 from file, 1 random as allowed, 2 bfloat16 to float32" in told
    assert "    random: head.weight" in told
    file.write_text('{"schema_version": 9}')
    assert any(f"{file} cannot be read" in line for line in story())
