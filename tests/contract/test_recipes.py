"""The recipes of examples/ that train models: each is begun by init and searched as it is, in a tiny size."""

from pathlib import Path
from typing import Any

import pytest
from transformers import ViTConfig, ViTForImageClassification

import dryfit
from dryfit.ledger.folder import StudyLayout
from dryfit.settings.trial import Outcome
from parts import need_package
from study_runs import fold
from tiny import model
from tiny_lms import causal_lm

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = "--use_cpu --report_to none --disable_tqdm True"
TWO_EPOCHS = f"--rows 16 --num_train_epochs 2 --eval_strategy epoch {QUIET}"


def vit(folder: Path) -> Path:
    """Write a random vision transformer for images of 16 x 16."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = ViTConfig(image_size=16, patch_size=4, num_attention_heads=2, **sizes)
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


RECIPES: dict[str, tuple[str, str, tuple[str, ...], int, str]] = {
    # needed package, arguments, settings, reports, what stays of the best
    "dpo_lora": ("trl", f"--max_length 64 {TWO_EPOCHS}", (), 2, "adapter_model.safetensors"),
    "token_classifier": (
        "transformers",
        TWO_EPOCHS,
        ("study.metric=eval_f1", "study.direction=maximize"),
        2,
        "model.safetensors",
    ),
    "image_classifier": (
        "transformers",
        f"--remove_unused_columns False {TWO_EPOCHS}",
        ("study.metric=accuracy", "study.direction=maximize"),
        2,
        "model.safetensors",
    ),
    "sentence_embeddings": (
        "sentence_transformers",
        "--rows 16 --batch_size 4",
        ("study.metric=eval_loss", "study.direction=minimize"),
        2,
        "model.safetensors",
    ),
    "lightning_module": (
        "lightning",
        "--width 8 --layers 1 --length 4 --rows 16 --epochs 2",
        ("study.metric=val_loss", "study.direction=minimize"),
        2,
        "last.ckpt",
    ),
}


KILLED = """
import os, runpy, signal, sys
from pathlib import Path
import dryfit

noted = dryfit.checkpointed


def checkpointed(step):
    noted(step)
    with open({log!r}, "a") as file:
        file.write(f"{{os.environ['DRYFIT_ATTEMPT']}} {{step}}\\n")
    if os.environ["DRYFIT_ATTEMPT"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


dryfit.checkpointed = checkpointed
runpy.run_path({recipe!r}, run_name="__main__")
"""


def test_a_lightning_module_that_was_killed_goes_on_after_its_last_epoch(tmp_path: Path) -> None:
    need_package("lightning")
    log, recipe = tmp_path / "log.txt", EXAMPLES / "lightning_module.py"
    (tmp_path / "killed.py").write_text(KILLED.format(log=str(log), recipe=str(recipe)), encoding="utf-8")
    (tmp_path / "own.toml").write_text(
        '[study]\ntask = "script"\nmetric = "loss"\ndirection = "minimize"\ntrials = 1\n'
        '[search]\nsampler = "random"\nmirror = "none"\n'
        '[script]\ncommand = "killed.py --lr {lr} --width 8 --layers 1 --length 4 --rows 16 --epochs 3"\n'
        "[space]\nlr = [0.001]\n",
        encoding="utf-8",
    )
    dryfit.tune(tmp_path / "own.toml")
    (trial,) = fold(tmp_path / "own").trials
    assert trial.outcome is Outcome.COMPLETE, trial.reason
    assert log.read_text().splitlines() == ["1 0", "2 1", "2 2"]
    assert [point.step for point in trial.reports] == [0, 1, 2]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_searched_as_it_is(recipe: str, tmp_path: Path) -> None:
    package, words, overrides, reports, left = RECIPES[recipe]
    need_package(package)
    made = {"dpo_lora": causal_lm, "image_classifier": vit}.get(recipe, model)
    given = [] if recipe == "lightning_module" else ["--model", str(made(tmp_path / "model"))]
    file = dryfit.init_script(tmp_path / "own", str(EXAMPLES / f"{recipe}.py"), [*given, *words.split()])
    dryfit.tune(file, trials=1, overrides=[*overrides, 'search.mirror="none"'])
    (trial,) = fold(file.parent).trials
    assert trial.outcome is Outcome.COMPLETE, trial.reason
    assert len(trial.reports) == reports
    assert trial.attempts[0].checkpoint_step == trial.reports[-1].step
    assert (StudyLayout(file.parent).trial(0).best / left).is_file()
