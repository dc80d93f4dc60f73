"""The whole space of the preset supermax, its seven models replaced by tiny random ones of the same architectures."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

import encoders
import tiny
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import LOG_FILE
from dryfit.study.template import preset_text
from study_runs import fold, marked_processes, start, summary_of

STAND_INS: Mapping[str, str] = {
    "bert-base-uncased": "bert",
    "bert-large-uncased": "bert",
    "roberta-base": "roberta",
    "roberta-large": "roberta",
    "microsoft/deberta-v3-base": "deberta-v3",
    "microsoft/deberta-v3-large": "deberta-v3",
    "xlm-roberta-base": "xlm-roberta",
}
# As many layers as the space may freeze, and positions for its longest rows.
LIKE_THE_REAL = {"num_hidden_layers": 8, "max_position_embeddings": 520}


def write_supermax(folder: Path, models: Path) -> Path:
    """The preset on stand-ins; nothing else of its space is changed."""
    text = preset_text("supermax")
    for number, (name, architecture) in enumerate(STAND_INS.items()):
        model = models / name.replace("/", "--")
        if not model.exists():
            encoders.model(model, architecture, seed=number, **LIKE_THE_REAL)
        assert f'"{name}"' in text
        text = text.replace(f'"{name}"', f'"{model}"')
    data = tiny.data(folder / "data", train=32, validation=16, seed=5)
    places = "".join(f'{split} = "{path}"\n' for split, path in data.items())
    assert "[data]\n" in text
    (folder / "study.toml").write_text(text.replace("[data]\n", f"[data]\n{places}"), encoding="utf-8")
    return folder


@pytest.mark.each_value
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "trials",
    [
        pytest.param(8, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param(200, marks=[pytest.mark.chaos_long, pytest.mark.timeout(14400)]),
    ],
)
def test_the_whole_space_of_supermax_has_no_failure(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, trials: int, checkpointing: bool
) -> None:
    folder = write_supermax(tmp_path / "study", tmp_path_factory.getbasetemp() / "stand-ins")
    settings = {
        "study.trials": trials,
        "runtime.parallel": 4,
        "execution.checkpointing": str(checkpointing).lower(),
        "execution.threads": 1,
        "search.mirror": "none",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    process = start("tune", folder, "--quiet", *words)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    state = fold(folder)
    attempts = [attempt for trial in state.trials for attempt in trial.attempts]
    assert [attempt.failure for attempt in attempts if attempt.failure is not None] == []
    assert len(attempts) == len(state.trials) == trials
    assert {trial.outcome for trial in state.trials} <= {Outcome.COMPLETE, Outcome.PRUNED}
    assert summary_of(folder)["trials"]["running"] == 0
    assert marked_processes(folder) == []
    logs = [log.read_text(encoding="utf-8") for log in folder.glob(f"trials/*/attempt-*/{LOG_FILE}")]
    assert len(logs) == trials and not any("meta tensor" in log for log in logs)
    met = Counter(Path(str(trial.params["model.name"])).name for trial in state.trials)
    assert trials < 100 or set(met) == {name.replace("/", "--") for name in STAND_INS}
