"""``dryfit rehearse`` as a user meets it, with simple arithmetic in place of the virtual GPU."""

import functools
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import dryfit
from dryfit.documents.command_line import app
from dryfit.documents.plans import plan_json
from dryfit.processes.rehearsal_process import RehearsalSurroundings
from dryfit.settings.devices import device_names
from dryfit.settings.errors import ConfigError, ObjectiveError
from dryfit.settings.memory_terms import DeviceSpec, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.rehearsal_messages import REHEARSED_VARIABLE
from dryfit.study import rehearsals

SUPPORT = str(Path(__file__).parents[1] / "support")
BATCH, STEPS = "--per_device_train_batch_size", "--gradient_accumulation_steps"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    start = RehearsalSurroundings(dict(os.environ), import_paths=(SUPPORT,), module="rehearsal_stand_in")
    monkeypatch.setattr(
        "dryfit.study.rehearsals.RehearsalOptions", functools.partial(rehearsals.RehearsalOptions, surroundings=start)
    )
    (tmp_path / "train.py").write_text("raise SystemExit\n")
    return "train.py"


def rehearsed(*words: str) -> Result:
    device = [] if words[:1] == ("--device",) else ["--device", "rtx4090"]
    return CliRunner().invoke(app, ["rehearse", *device, *words])


def test_a_script_that_fits(script: str) -> None:
    done = rehearsed(script, "fits", "4", "--device", "nonsense", "-q", "--json")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "rehearsal fits: the script needs 6.9 GiB, device has 23.5 GiB (rtx4090)"
    assert lines[1:3] == [
        "peak at backward, model.layers.3.mlp, aten.mm.default",
        "  train.py:88  loss.backward()  in transformers/models/qwen2/modeling_qwen2.py:312",
    ]
    for part in (
        "4.0 GiB\tactivations\ttrain.py:88\tin transformers/models/qwen2/modeling_qwen2.py:312\tmodel.layers.3.mlp",
        "memory grows by 1.0 GiB a step; most of what is kept is made here:\n  train.py:91  losses.append(loss)",
        "worst batch   input_ids 4 x 512; largest of 2000 batches looked at, of 12000; trained on first",
        "a step        1.5 TFLOP, 40 GB read and written; at least 41.2 ms on rtx4090 (165 TFLOP/s",
        "left out      checkpoint: out/checkpoint-3, 1.0 GiB",
        "left out      wandb run: me/mine\n",
        "unknown       flash_attn has no stand-in at train.py:40  flash_attn_func(q, k, v)",
        "note          torch.compile was run eagerly",
        "3 steps rehearsed in 12.5 s, 512 MiB of host memory",
    ):
        assert part in done.stdout, part
    assert "on stderr" in done.stderr  # what the script prints, on either stream
    assert "environment True" in done.stderr


def test_quiet_is_the_answer_alone(script: str) -> None:
    assert rehearsed("-q", script, "fits", "4").stderr == ""


def test_json_has_the_keys_of_a_plan(script: str) -> None:
    done = rehearsed("--json", "--quiet", "torchrun", "--nproc-per-node", "8", script, "fits", "4")
    view = json.loads(done.stdout)
    device = DeviceSpec.model_validate(view["device"], strict=False)
    plan = plan_json(PlanAnswer(verdict=VerdictKind.UNKNOWN, device=device, torch="", planner_s=0.0))
    assert plan.keys() - {"cost"} <= view.keys()  # a rehearsal's cost stands in its run
    assert (view["verdict"], view["ran"], view["ranks"], view["flops_per_step"]) == ("fits", True, 8, 1.5e12)
    assert view["by_line"][0]["line"] == "train.py:88"
    assert view["sent_bytes"] == {"all_reduce": 2**30}
    assert view["worst_batch"]["shapes"] == {"input_ids": [4, 512]}
    assert (view["fits"], view["ended"], view["timeline"]) == (True, view["end"], None)
    long = json.loads(rehearsed("--json-timeline", "--quiet", script, "fits", "4").stdout)
    assert len(view["steps"]) == 3 and len(long["timeline"]) == 12


def test_hours_and_cost_of_a_run(script: str, tmp_path: Path) -> None:
    l40s = ("--device", "l40s", "--quiet")
    text = rehearsed(*l40s, script, "fits", "4").stdout
    assert "run           600 steps an epoch; --train-steps N tells the hours of a run\n" in text
    assert "the loader made 42 batches/s here in one process; the script asks for 2 workers" in text
    # 72 000 steps of 0.1 s in the optimizer and half of 0.4 s beside it are six hours.
    priced = (*l40s, "--train-steps", "72000", "--price", "1.50usd", script, "fits", "4")
    view = json.loads(rehearsed("--device", "l40s", "--json", *priced[2:]).stdout)["run"]
    assert view["hours"] == pytest.approx({"estimate": 6.0, "low": 5.0, "high": 7.0})
    assert view["cost"]["estimate"] == pytest.approx(9.0) and view["cost"]["currency"] == "USD"
    assert (view["steps"], view["source"], view["cost"]["is_old"]) == (72000, "--train-steps", False)
    text = rehearsed(*priced).stdout
    assert "run           72000 steps (--train-steps): 5 to 7 h (80 %), about 6 h\n" in text
    assert "cost          7.50 to 10.50 USD (80 %), about 9.00; 1.50 an hour as of " in text
    assert "hours by the mean batch: 50% of the elements of the timed one" in text


def test_why_there_is_no_cost(script: str, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('[h200]\nper_hour = 2\ncurrency = "EUR"\nas_of = 2026-01-31\n')
    words = ("--prices", str(prices), "--train-steps", "9", script, "fits", "4")
    assert "no cost: the prices have none of l40s" in rehearsed("--device", "l40s", *words).stderr
    priced = ("--price", "2", "--train-steps", "9", script, "fits", "4")
    done = rehearsed("--device", "24GiB", *priced)
    assert "no cost: the time of a step on 24GiB is not known" in done.stderr
    assert "run           9 steps (--train-steps); without the time of a step on 24GiB" in done.stdout
    assert "--train-steps N tells it" in rehearsed("--device", "l40s", "--price", "2", script, "fits", "4").stderr
    for refused in (("--device", "l40s,h200", *priced), ("--device", "l40s", "--largest=fits", *priced)):
        assert isinstance(rehearsed(*refused).exception, ConfigError)


def test_the_cheapest_and_the_fastest_of_several_devices(script: str, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    one = '[{}]\nper_hour = {}\ncurrency = "EUR"\nas_of = 2026-01-31\n'
    prices.write_text(one.format("h200", 3) + one.format("l40s", 1))
    words = ("--prices", str(prices), "--train-steps", "72000", "--quiet", script, "fits", "4")
    text = rehearsed("--device", "l40s,h200,rtx4090", *words).stdout
    assert "cheapest that fits: l40s, 5.00 to 7.00 EUR\n" in text and "fastest that fits: " in text
    assert "prices older than 90 days: l40s (2026-01-31), h200 (2026-01-31)" in text
    rows = [line.split("\t") for line in text.splitlines() if "GiB\t" in line]
    assert [row[0] for row in rows] == ["l40s", "h200", "rtx4090"]
    assert [row[-1] for row in rows] == ["5.00 to 7.00 EUR", "15.00 to 21.00 EUR", ""]


def test_ranks_and_accelerate(script: str) -> None:
    words = ("accelerate", "launch", "--mixed_precision", "bf16", "--num_processes", "2", script, "fits", "4")
    done = rehearsed(*words)
    assert "environment True bf16" in done.stderr
    assert "on each of 2 devices" in done.stdout
    assert "on each of 4 devices" in rehearsed("--ranks", "4", *words).stdout


def test_a_script_that_does_not_fit(script: str) -> None:
    done = rehearsed("--quiet", script, "fits", "32")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0] == (
        "rehearsal does not fit: the script needs 34.9 GiB, device has 23.5 GiB (rtx4090)    [REHEARSE-NOFIT]"
    )
    assert "out of memory in step 1, backward: 20 MiB asked for; the script did not catch it" in done.stdout


def test_the_ladder_says_what_to_add_to_the_command(script: str) -> None:
    done = rehearsed("--quiet", "--ladder", script, "fits", "32")
    assert done.exit_code == 1  # the command as it was given does not fit
    said = f"{BATCH} 16 {STEPS} 2"
    assert f"it fits with {said}    [REHEARSE-NOFIT]" in done.stdout.splitlines()[0]
    assert f"it fits with (equal up to rounding):\n  {said}\n" in done.stdout
    view = json.loads(rehearsed("--quiet", "--json", "--ladder", script, "fits", "32").stdout)
    assert view["verdict"] == "fits_with"
    assert view["ladder"][0]["arguments"] == said.split()
    assert 2 <= len(view["ladder"]) <= 5


def test_a_script_that_fails_by_itself(script: str) -> None:
    for options in ((), ("--quiet",), ("--quiet", "--json")):
        done = rehearsed(*options, script, "failed")
        assert done.exit_code == 2
        assert "KeyError: 'here'" in done.stderr
        where = "unknown       flash_attn has no stand-in at train.py:40"  # it may have gone another way there
        assert (where in done.stderr) is ("--json" not in options)
    assert json.loads(done.stdout)["ran"] is False
    died = rehearsed(script, "abort")
    assert died.exit_code == 2
    assert died.stderr.count("terminate called without an active exception") == 1
    assert "ended by signal SIGABRT" in died.stderr


@pytest.mark.parametrize(("act", "again"), [("abort", True), ("exit", False), ("kill", False), ("failed", False)])
def test_only_a_crash_is_rehearsed_again_with_room_for_everything(script: str, act: str, again: bool) -> None:
    done = rehearsed(script, act)
    assert done.exit_code == 2
    assert ("on a device without a limit" in done.stderr) is again


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "there is no file missing.py"),
        (["train.ipynb", "--lr", "1"], "nbconvert"),
        (["torchrun", "--nproc-per-node", "2", "a b.ipynb"], "nbconvert --to script 'a b.ipynb'"),
        ([], "no script was given"),
        (["--unknown", "x.py"], "there is no option --unknown"),
        (["--devcie", "a100", "x.py"], "did you mean --device?"),
        (["--no-wrost-batch", "x.py"], "did you mean --no-worst-batch?"),
        (["--step=4", "x.py"], "did you mean --steps?"),
        (["deepspeed", "--num_nodes", "2", "train.py"], "several machines"),
        (["--device", "rtx409", "train.py", "fits", "1"], "rtx4090"),
        (["--device", "cpu:16GiB", "train.py", "fits", "1"], "a CUDA device"),
        (["--device", "a100-80", "--device", "rtx409", "train.py", "fits", "1"], "rtx409"),
        (["--device", "a100-80,a100-80", "train.py", "fits", "1"], "a100-80 is named twice"),
        (["--device", "all,rtx4090", "train.py", "fits", "1"], "rtx4090 is named twice"),
        (["--device", "a100-80,,l4", "train.py", "fits", "1"], "one has no name"),
        (["--device", "a100-80,cpu:16GiB", "train.py", "fits", "1"], "a CUDA device"),
        (["--device", "a100-80,l4", "--html", "page.html", "train.py", "fits", "1"], "--html with several devices"),
        (["--emit", "sbatch", "train.py", "fits", "1"], "both, or neither"),
        (["--emit", "skypilot", "--json", "train.py", "fits", "1"], "--emit with --json"),
        (["--timeout", "0", "train.py", "fits", "1"], "timeout"),
        (["accelerate", "launch", "--config_file", "no.yaml", "train.py"], "no.yaml"),
    ],
)
def test_what_cannot_be_run_is_an_error(script: str, words: list[str], said: str) -> None:
    error = rehearsed(*words).exception
    assert isinstance(error, ConfigError) and error.exit_status == 2
    assert said in str(error)


def test_several_devices_have_one_table(script: str) -> None:
    done = rehearsed("--device", "a100-80,rtx4090", "--device", "rtx3080", "-q", script, "fits", "16")
    assert done.exit_code == 1, done.output
    assert done.stdout.splitlines()[:6] == [
        "rehearsal fits on 2 of 3 devices: a100-80, rtx4090",
        "",
        "device\tfits\trequired\tof\tleft over",
        "a100-80\tyes\t18.9 GiB\t79.1 GiB\t60.3 GiB",
        "rtx4090\tyes\t18.9 GiB\t23.5 GiB\t4.6 GiB",
        "rtx3080\tno\t18.9 GiB\t9.6 GiB\t-9.2 GiB",
    ]
    assert rehearsed("--device", "a100-80,rtx4090", "-q", script, "fits", "16").exit_code == 0
    assert rehearsed("--device", "a100-80,rtx4090", "-q", script, "failed").exit_code == 2
    view = json.loads(rehearsed("--device", "a100-80,rtx3080", "-q", "--json", script, "fits", "16").stdout)
    assert (view["fits"], [one["fits"] for one in view["devices"]]) == (False, [True, False])
    own = json.loads(rehearsed("--device", "rtx3080", "-q", "--json", script, "fits", "16").stdout)
    assert own.keys() < view["devices"][1].keys()
    assert own == {key: view["devices"][1][key] for key in own}


def test_all_devices_on_several_ranks(script: str) -> None:
    view = json.loads(rehearsed("--device", "all", "--ranks", "4", "-q", "--json", script, "fits", "16").stdout)
    assert [one["device"]["name"] for one in view["devices"]] == list(device_names())
    assert {one["ranks"] for one in view["devices"]} == {4}


def test_the_devices_that_fit_are_asked_for_in_the_words_of_others(script: str, tmp_path: Path) -> None:
    done = rehearsed("--device", "rtx3080,a100-80,l4,a30", "--ranks", "2", "--emit", "skypilot", script, "fits", "16")
    assert (done.exit_code, done.stdout) == (0, "resources:\n  accelerators: {A100-80GB: 2, L4: 2}\n")
    assert "it fits on these too, which have no name there: a30" in done.stderr
    table = tmp_path / "cluster.toml"
    words = ("--device", "a100-80,rtx3080,l4", "--emit", "sbatch", "--emit-table", str(table), "-q", script, "fits")
    table.write_text('"A100 80GB" = { gres = "a100" }\nl4 = { gres = "l4", constraint = "l4" }\n')
    assert rehearsed(*words, "32").stdout == "#SBATCH --gres=gpu:a100:1\n"
    error = rehearsed(*words, "16").exception
    assert isinstance(error, ConfigError) and "a100-80 has no constraint" in str(error)
    table.write_text('a100-80 = { gres = "a100", constraint = "gpu80" }\nl4 = { gres = "l4", constraint = "l4" }\n')
    assert rehearsed(*words, "16").stdout == '#SBATCH --gres=gpu:1\n#SBATCH --constraint="gpu80|l4"\n'
    nowhere = rehearsed(*words, "160")
    assert (nowhere.exit_code, nowhere.stdout) == (1, "")
    for wrong in ('a100-80 = { gres = "a; rm" }', "a100-80 = 3", 'a100 = { gres = "a100" }'):
        table.write_text(wrong)
        assert isinstance(rehearsed(*words, "16").exception, ConfigError), wrong


def test_the_largest_value_is_found_for_each_device(script: str) -> None:
    for words in ((script, "fits", "4"), (script, "fits", "64")):
        done = rehearsed("--device", "rtx4090,rtx3080", "-q", "--largest=fits", *words)
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[:2] == [
            "the largest fits that fits rtx4090 (23.5 GiB) is 20; 21 does not; each more takes 1,024.0 MiB",
            "the largest fits that fits rtx3080 (9.6 GiB) is 6; 7 does not; each more takes 1,024.0 MiB",
        ]
    view = json.loads(rehearsed("-q", "--json", "--largest", "fits", script, "fits", "4").stdout)
    (one,) = view["devices"]
    assert (view["name"], one["largest"]["value"], one["following"]["value"], one["is_known"]) == ("fits", 20, 21, True)
    assert one["bytes_per_unit"] == 2**30 and 4 <= len(one["tried"]) <= 6
    none = rehearsed("--device", "1GiB", "-q", "--largest=fits", script, "fits", "4")
    assert none.exit_code == 1 and none.stdout.startswith("no fits is known to fit 1GiB (1.0 GiB): 1 does not")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--largest=--rows", "train.py", "fits", "4"], "the command has no --rows"),
        (["--largest=--rows", "train.py", "--row", "4"], "did you mean --row?"),
        (["--largest", "train.py", "fits", "4"], "is what is run, not an argument"),
        (["--largest", "-m", "train", "--rows", "4"], "is what is run, not an argument"),
        (["--largest=", "train.py", "fits", "4"], "--largest=NAME"),
        (["--largest=--rows", "train.py", "--rows", "auto"], "--rows is auto"),
        (["--largest=--rows", "train.py", "--rows=0"], "--rows is 0"),
        (["--largest=--rows", "train.py", "--rows", "-4"], "--rows is -4"),
        (["--largest=--rows", "train.py", "--rows=4.5"], "--rows is 4.5"),
        (["--largest=--rows", "train.py", "--rows"], "--rows is nothing"),
        (["--largest=--rows", "train.py", "--rows", "4", "--rows=4"], "--rows is given 2 times"),
        (["--largest=a.rows", "train.py", "a.rows=x"], "a.rows is x"),
        (["--largest=--rows", "--ladder", "train.py", "--rows", "4"], "--largest with"),
        (["--largest=--rows", "train.py", "fits", "4", "--rows", "4"], "it ignores --rows"),
        (["--largest=--rows", "train.py", "failed", "--rows=4"], "KeyError: 'here'"),
    ],
)
def test_an_argument_without_a_largest_value_is_refused(script: str, words: list[str], said: str) -> None:
    error = rehearsed("-q", *words).exception
    assert isinstance(error, ConfigError) and error.exit_status == 2
    assert said in str(error)


def test_a_page_is_written(script: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert rehearsed("--quiet", "--html", str(page), script, "fits", "4").exit_code == 0
    assert "train.py fits 4" in page.read_text(encoding="utf-8")
    page.write_text("mine")
    assert isinstance(rehearsed("--quiet", "--html", str(page), script, "fits", "4").exception, ConfigError)


def own_function() -> None:
    raise AssertionError("a child of its own calls it")


def test_functions_that_nobody_else_can_import(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectiveError, match="the function to rehearse: it is a lambda|it is a lambda"):
        dryfit.rehearse(lambda: None, device="24GiB")
    with pytest.raises(ConfigError, match="a function takes none"):
        dryfit.rehearse(own_function, device="24GiB", arguments=["--lr"])
    monkeypatch.setenv(REHEARSED_VARIABLE, "1")
    with pytest.raises(ObjectiveError, match="itself a rehearsal"):
        dryfit.rehearse(own_function, device="24GiB")


def test_the_python_api_answers_as_the_command(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dryfit.study.rehearsals.RehearsalOptions", rehearsals.RehearsalOptions)
    answer = dryfit.rehearse(script, device="24GiB", arguments=["fits", "4"], ladder=True)
    assert (answer.verdict, answer.fits) == (VerdictKind.FITS, True)
