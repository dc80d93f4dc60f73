"""The arguments that the ladder of a rehearsal tells make the script fit: the command is repeated with them."""

import json
from pathlib import Path

import pytest

from study_runs import run

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PROGRAM = Path(__file__).parents[1] / "programs" / "parsed_arguments.py"


def test_the_command_fits_with_what_it_was_told(tmp_path: Path) -> None:
    options = ("rehearse", "--device", "1536MiB", "--json", "--quiet")
    own = (str(PROGRAM), "--output_dir", str(tmp_path / "out"), "--report_to", "none")
    asked = ("--per_device_train_batch_size", "64")
    refused = run(*options, "--ladder", *own, *asked)
    assert refused.returncode == 1, refused.stderr
    answer = json.loads(refused.stdout)
    assert answer["verdict"] == "fits_with"
    seen = answer["training_arguments"]
    assert (seen["values"]["per_device_train_batch_size"], seen["from_command_line"]) == (64, True)
    best = answer["ladder"][0]
    assert best["fits"] and best["effect"] == "numerics"
    told = dict(zip(best["arguments"][::2], best["arguments"][1::2], strict=True))
    rows, steps = told["--per_device_train_batch_size"], told["--gradient_accumulation_steps"]
    assert int(rows) * int(steps) == 64
    again = run(*options, *own, *best["arguments"])
    assert again.returncode == 0, again.stderr
    needs = json.loads(again.stdout)["required_bytes"]
    assert needs == pytest.approx(best["required_bytes"], rel=0.01)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
