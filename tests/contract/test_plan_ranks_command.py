"""``dryfit plan --set execution.tp=N`` as a user meets it, with the real planner and a pretended GPU."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from rank_plans import config
from study_runs import command


@pytest.mark.slow
def test_the_answer_is_a_table_one_object_or_a_clear_refusal(tmp_path: Path) -> None:
    bert = config(tmp_path / "bert")
    environment = {**os.environ, "DRYFIT_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}

    def ask(model: Path, *sets: str, more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        usual = (f"model.name={model}", "train.max_length=32", "train.batch_size=8", *sets)
        words = ("plan", "--device", "24GiB", *(word for one in usual for word in ("--set", one)), *more)
        return subprocess.run(command(*words), capture_output=True, text=True, env=environment, check=False)

    done = ask(bert, "execution.tp=2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("plan fits")
    assert " on each of 2 devices, device has 24.0 GiB (24GiB)" in lines[0]
    assert "parameter\tcount\twhole -> of a rank\tsharded by" in lines
    assert "encoder.encoder.layer.*.attention.self.query.weight\t3\t[64, 64] -> [32, 64]\tcolumn" in lines
    assert "encoder.encoder.layer.*.output.dense.weight\t3\t[64, 96] -> [64, 48]\trow" in lines
    for said in ("sharded over 2 ranks", "weights of a rank: ", "sent by a rank in an optimizer step: ", "proved: "):
        assert any(line.startswith(said) for line in lines), done.stdout

    again = ask(bert, "execution.tp=2", more=("--json",))
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    cut = found["cut"]
    assert (cut["degree"], cut["weight_bytes"] < cut["whole_weight_bytes"]) == (2, True)
    # Forward: what each of three layers' two output matrices add up, 8 rows of 32 tokens with 64 features in fp32.
    assert cut["sent"]["forward_bytes"] == 3 * 2 * 8 * 32 * 64 * 4
    assert sum(row["count"] for row in cut["rows"]) == cut["cut"] + cut["whole"]
    assert found["cannot_cut"] == ""

    for sets, said in (
        (("execution.tp=3",), "3 does not divide 4"),
        (("execution.tp=2", "optim.name=adafactor"), "adafactor computes with whole parameters"),
    ):
        refused = ask(bert, *sets)
        assert refused.returncode == 2, refused.stdout
        assert said in refused.stderr
        assert "[CONFIG]" in refused.stderr
        assert not refused.stdout
