"""A checkpoint's health, and where a trial's weights came from, as rows of text."""

from pathlib import Path

import pytest

from dryfit.documents.findings import health_table, health_verdict, size_text
from dryfit.documents.story import story_lines, trial_story
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.check_messages import Adapter, Health, LoadReport, Stored, StoredFile, Subject
from dryfit.settings.files import write_model
from golden import Golden
from ledgers import begun


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1_000, "1 kB"), (98_552, "98.6 kB"), (1.3406e9, "1.34 GB")]
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def test_long_lists_end_with_a_count(golden: Golden) -> None:
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
    golden("load", health_table(health), health_verdict(health))


def test_verdicts(golden: Golden) -> None:
    healthy = Health(folder="f", subject=Subject.MODEL, healthy=True, task="causal-lm")
    adapter = Adapter(kind="LORA", base="", layers=2, rank=8)
    pairs = Health(folder="f", subject=Subject.ADAPTER, healthy=True, adapter=adapter)
    broken = Health(folder="f", subject=Subject.MODEL, healthy=False, errors=("it is cut short",))
    golden("load", [health_verdict(one) for one in (healthy, pairs, broken)], health_table(pairs))


def test_a_trial_s_story_tells_where_its_weights_came_from(tmp_path: Path, golden: Golden) -> None:
    layout = StudyLayout(tmp_path)
    script = begun()
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
    golden("show", [line for line in story() if "loaded" in line or "random:" in line])
    file.write_text('{"schema_version": 9}')
    assert any(f"{file} cannot be read" in line for line in story())
