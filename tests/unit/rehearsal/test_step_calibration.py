"""A measured step sets one number of a device: found, kept, used; and refused where no number explains the step."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_step_time import BF16, FP32, OPTIMIZER, Kind, matmul, memory

from dryfit.gpu.step_time import Operation, Timing, fitted_reach, step_time
from dryfit.settings.device_reach import ReachLevel, device_reach
from dryfit.settings.devices import ProductPrecision, device_rates, parse_device
from dryfit.settings.errors import ConfigError
from dryfit.settings.reach_calibrations import (
    REACH_FILE,
    ReachCalibration,
    calibrated_reach,
    keep_reach,
    read_reach_calibrations,
)
from dryfit.settings.version import PACKAGE_FOLDER
from dryfit.study.step_calibrations import _given

DEVICE = parse_device("l40s")


def timing(reach):
    rates = device_rates(DEVICE)
    assert rates is not None
    return Timing(rates, reach, DEVICE.capability)


def fitted(step, measured_s, share=1.0, least_s=0.0):
    return fitted_reach(step, timing, device_reach("l40s"), least_s, measured_s, share)


@pytest.mark.parametrize(
    ("one", "quantity"),
    [
        (matmul(1, 8192, 8192, 8192, precision=BF16), "tensor"),
        (matmul(1, 8192, 8192, 8192, precision=FP32, size=4), "simt"),
        (memory(Kind.ELEMENTWISE, 10**10), "bandwidth"),
    ],
)
@pytest.mark.parametrize("value", [0.3, 0.9])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_number_is_found_again(one: Operation, quantity: str, value: float, share: float) -> None:
    step = [(one, 10), (memory(Kind.OPTIMIZER, 10**8, OPTIMIZER), 5)]
    told = step_time(step, timing(replace(device_reach("l40s"), **{quantity: value})), 0.0)
    measured_s = told.optimizer_s + (told.estimate_s - told.optimizer_s) * share
    found = fitted(step, measured_s, share)
    assert found.quantity == quantity and found.value == pytest.approx(value, rel=1e-6)
    assert found.before == getattr(device_reach("l40s"), quantity)


def test_a_card_without_a_number_gets_one() -> None:
    step = [(matmul(1, 8192, 8192, 8192, precision=ProductPrecision.FP16), 10)]
    t4 = parse_device("t4")
    rates = device_rates(t4)
    assert rates is not None and step_time(step, Timing(rates, device_reach("t4"), t4.capability), 0.0) is None
    found = fitted_reach(step, lambda one: Timing(rates, one, t4.capability), device_reach("t4"), 0.0, 1.0, 1.0)
    assert found.quantity == "tensor" and found.value is not None


def test_what_no_number_explains_is_refused() -> None:
    step = [(matmul(1, 8192, 8192, 8192), 10)]
    assert fitted(step, 1e-9).value is None and fitted(step, 1e9).value is None
    assert "whatever the device reaches" in fitted(step, 1e9).why
    small = [(memory(Kind.ELEMENTWISE, 8), 1000)]
    assert "the host decides" in fitted(small, 1e-2).why
    assert fitted([], 1.0).value is None


def made(**changes) -> ReachCalibration:
    first = ReachCalibration(
        device="l40s",
        quantity="tensor",
        value=0.7,
        measured_s=0.36,
        torch="2.13.0+cu130",
        watts=350,
        day="2026-11-20",
        command="train.py",
    )
    return first.model_copy(update=changes)


def test_calibrations_are_kept_by_device_torch_power_limit_and_number(tmp_path: Path) -> None:
    for one in (made(), made(value=0.8), made(watts=300), made(torch="2.12.1"), made(quantity="bandwidth", value=0.9)):
        keep_reach(tmp_path / "new", one)
    kept = read_reach_calibrations(tmp_path / "new")
    assert [(one.value, one.watts, one.torch[:4]) for one in kept] == [
        (0.8, 350, "2.13"),
        (0.7, 300, "2.13"),
        (0.7, 350, "2.12"),
        (0.9, 350, "2.13"),
    ]
    assert read_reach_calibrations(tmp_path) == ()
    (tmp_path / REACH_FILE).write_text("{}garbage")
    assert read_reach_calibrations(tmp_path) == ()


def test_the_newest_of_the_same_torch_is_used() -> None:
    found = calibrated_reach("l40s", "2.13.1", [made(), made(value=0.5, torch="2.12.0"), made(device="h200")])
    assert (found.tensor, found.level, found.calibrated) == (0.7, ReachLevel.CALIBRATED, {"tensor"})
    assert calibrated_reach("l40s", "2.9", [made()]).tensor == 0.7
    assert calibrated_reach("h200", "2.13", [made()]) == device_reach("h200")
    assert calibrated_reach("24GiB", "2.13", [made()]) is None


def test_only_steps_that_its_number_decides_are_surer() -> None:
    reach = calibrated_reach("l40s", "2.13", [made()])
    half, single = ([(matmul(1, 8192, 8192, 8192, precision=one), 10)] for one in (BF16, FP32))
    assert step_time(half, timing(reach), 0.0).level == "calibrated"
    assert step_time(single, timing(reach), 0.0).level == "guessed"
    spread = [
        told.high_s / told.estimate_s
        for told in (step_time(half, timing(one), 0.0) for one in (reach, device_reach("l40s")))
    ]
    assert spread[0] < spread[1]


def test_seconds_come_from_a_number_or_from_results(tmp_path: Path) -> None:
    assert _given("0.363") == 0.363
    results = tmp_path / "train_results.json"
    results.write_text(json.dumps({"train_steps_per_second": 4.0}))
    assert _given(str(results)) == 0.25
    results.write_text(json.dumps({"log_history": [{"loss": 1}, {"train_steps_per_second": 2.0}, {"eval": 1}]}))
    assert _given(str(results)) == 0.5
    for wrong in ('{"loss": 1}', "[]", "no json", '{"train_steps_per_second": 0}', '{"train_steps_per_second": "x"}'):
        results.write_text(wrong)
        with pytest.raises(ConfigError):
            _given(str(results))
    for wrong in ("0", "-1", "nan", "inf", str(tmp_path / "absent.json")):
        with pytest.raises(ConfigError):
            _given(wrong)


SCRIPT = """
import sys, torch
layers = [torch.nn.Linear(4, 4) for _ in range(2)]
optimizers = [torch.optim.SGD(layer.parameters()) for layer in layers]
for _ in range(int(sys.argv[1])):
    for layer, optimizer in zip(layers, optimizers):
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
print("the end")
raise SystemExit(3)
"""


def test_a_real_run_is_ended_after_its_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "work.py").write_text("")  # a name that this package has too
    file = PACKAGE_FOLDER / "gpu" / "timed_run.py"
    told = {}
    for steps in ("1000", "5"):
        run = [sys.executable, str(file), str(tmp_path / "answer.json"), "8", "train.py", steps]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told[steps] = json.loads((tmp_path / "answer.json").read_text()) | {"printed": done.stdout}
    assert told["1000"]["steps"] == 9 and told["1000"]["step_s"] > 0 and not told["1000"]["printed"]
    assert told["5"]["steps"] == 5 and told["5"]["error"] == "exit status 3" and told["5"]["device"] == ""
