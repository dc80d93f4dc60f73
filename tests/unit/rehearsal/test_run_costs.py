"""Hours and costs by hand, and prices that are refused."""

from datetime import date
from pathlib import Path

import pytest

from dryfit.settings.devices import parse_device
from dryfit.settings.errors import ConfigError
from dryfit.settings.rehearsal_messages import RunTime
from dryfit.settings.run_costs import Price, Prices, given_price, price_file, with_costs
from rehearsal_stand_in import GIB, answer_of, step_time

TODAY = date(2026, 11, 20)
GOOD = 'per_hour = 1.80\ncurrency = "USD"\nas_of = 2026-11-01\nsource = "mine"\n'


def run_of(share: float | None = None, steps: int | None = 36_000, ranks: int = 1, **time):
    answer = answer_of(GIB, parse_device("l40s"), ranks=ranks)
    run = RunTime(steps=steps, source="the script", epoch_steps=None, batch_share=share, batches_per_s=None, workers=0)
    work = answer.work.model_copy(update={"step_time": step_time().model_copy(update=time)})
    return answer.model_copy(update={"run": run, "work": work})


def test_hours_are_steps_of_the_mean_batch() -> None:
    hours = with_costs(run_of(), None, None).run.hours
    assert (hours.low, hours.estimate, hours.high) == pytest.approx((4, 5, 6))
    # Of half the elements all but the 0.1 s of the optimizer take half the time.
    hours = with_costs(run_of(0.5), None, None).run.hours
    assert (hours.low, hours.estimate, hours.high) == pytest.approx((2.5, 3, 3.5))
    # Where the host may decide, it does whatever the batch.
    hours = with_costs(run_of(0.5, high_s=0.9, launch_bound_high_s=0.9), None, None).run.hours
    assert hours.high == pytest.approx(9)


def test_the_user_knows_the_steps_better() -> None:
    assert with_costs(run_of(steps=None), None, None).run.hours is None
    run = with_costs(run_of(steps=5), 36_000, None).run
    assert (run.steps, run.source, run.hours.estimate) == (36_000, "--train-steps", pytest.approx(5))
    nothing = run_of().model_copy(update={"run": None})
    assert with_costs(nothing, 5, None) is nothing


def test_cost_is_hours_of_all_devices_and_an_old_price_is_told() -> None:
    price = Price(2.0, "USD", date(2026, 8, 22))
    cost = with_costs(run_of(ranks=4), None, Prices(TODAY, price)).run.cost
    assert (cost.low, cost.estimate, cost.high, cost.is_old) == (*map(pytest.approx, (32, 40, 48)), False)
    older = Prices(TODAY, by_device={"l40s": Price(2.0, "USD", date(2026, 8, 21))})
    assert with_costs(run_of(), None, older).run.cost.is_old
    assert with_costs(run_of(), None, Prices(TODAY, by_device={})).run.cost is None


def test_prices_are_read(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(f"[l40s]\n{GOOD}[a100-80]\n{GOOD}")
    assert price_file(file, TODAY).of(parse_device("a100-80")) == Price(1.8, "USD", date(2026, 11, 1))
    assert price_file(file, TODAY).of(parse_device("h200")) is None
    assert given_price("2", TODAY).of(parse_device("24GiB")) == Price(2.0, "", TODAY)
    assert given_price(" 1.80 eur ", TODAY).of(parse_device("24GiB")) == Price(1.8, "EUR", TODAY)


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "1,80", "$2", "2 dollars", "1e3", "inf", "9" * 400])
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(ConfigError):
        given_price(text, TODAY)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"[l40s]\n{GOOD}".replace("as_of = 2026-11-01", ""), "as_of"),
        (f"[l40s]\n{GOOD}".replace("2026-11-01", '"2026-11-01"'), "as_of"),
        (f"[l40s]\n{GOOD}".replace("2026-11-01", "2026-11-01T10:00:00"), "as_of"),
        (f"[l40s]\n{GOOD}".replace("2026-11-01", "2026-11-21"), "as_of"),
        (f"[l40s]\n{GOOD}".replace("1.80", "0"), "per_hour"),
        (f"[l40s]\n{GOOD}".replace("1.80", "inf"), "per_hour"),
        (f"[l40s]\n{GOOD}".replace("1.80", "true"), "per_hour"),
        (f"[l40s]\n{GOOD}".replace("1.80", "9" * 400), "per_hour"),
        (f"[l40s]\n{GOOD}".replace("USD", "dollars"), "currency"),
        (f"[l40s]\n{GOOD}spot = true\n", "spot"),
        (f"[l41s]\n{GOOD}", "l41s"),
        ("l40s = 1.8", "l40s"),
        (f"[l40s]\n{GOOD}[a100-80]\n{GOOD}".replace("USD", "EUR", 1), "a100-80 in USD"),
        ("[l40s\n", "prices.toml"),
        (None, "no such file"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "prices.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        price_file(file, TODAY)
    assert said in str(raised.value)
