"""Costs of whole runs: from their hours and the user's own prices."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final, cast

from dryfit.settings.devices import device_names, known_name
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.rehearsal_messages import Interval, RehearsalAnswer, RunCost, run_hours
from dryfit.settings.study_file_reading import read_toml

_DOING: Final = "reading prices"
_OLD_DAYS: Final = 90
_MOST: Final = 1e9
"""No hour costs so much: a cost stays a number."""
_KEYS: Final = frozenset({"per_hour", "currency", "as_of", "source"})
_PRICE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]{3}|)")


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour of one device costs.

    Attributes:
        currency: Three letters, or empty where the user did not say.
        as_of: The day on which it was true.
    """

    per_hour: float
    currency: str
    as_of: date


@dataclass(frozen=True, slots=True)
class Prices:
    """The user's prices.

    Attributes:
        today: The day on which they are read.
        of_all: Of whatever device is rehearsed; None: by name.
        by_device: By the name of a known device.
    """

    today: date
    of_all: Price | None = None
    by_device: Mapping[str, Price] | None = None

    def of(self, device: DeviceSpec) -> Price | None:
        """Return the price of a device; None: there is none."""
        return self.of_all or (self.by_device or {}).get(known_name(device))


def given_price(text: str, today: date) -> Prices:
    """Return a price of the command line: ``1.80`` or ``1.80USD`` an hour, of today.

    Raises:
        ConfigError: It is none.
    """
    match = _PRICE.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) < _MOST:
        raise ConfigError("reading --price", f"{text!r}", "an amount above 0 an hour, such as 1.80 or 1.80USD")
    return Prices(today, Price(float(match[1]), match[2].upper(), today))


def price_file(path: Path, today: date) -> Prices:
    """Return the prices of a file: a table of each device, with ``per_hour``, ``currency``, ``as_of`` and ``source``.

    Raises:
        ConfigError: The file cannot be read, or a price is not one; has no date; or they are of several currencies.
    """
    read = read_toml(path, "a file of prices", "[l40s]\nper_hour = 1.80")
    prices = {name: _price(f"{path}: [{name}]", name, entry, today) for name, entry in read.items()}
    if len({price.currency for price in prices.values()}) > 1:
        said = ", ".join(f"{name} in {price.currency}" for name, price in prices.items())
        raise ConfigError(_DOING, f"{path}: {said}", "prices of one currency, which can be compared")
    return Prices(today, by_device=prices)


def _price(place: str, name: str, entry: Any, today: date) -> Price:
    if name not in device_names():
        raise ConfigError(_DOING, f"{place} is no known device", f"one of {', '.join(device_names())}")
    table = cast("dict[str, Any]", entry if isinstance(entry, dict) else {})
    if unknown := sorted(table.keys() - _KEYS):
        raise ConfigError(_DOING, f"{place}: {', '.join(unknown)}", f"keys among {', '.join(sorted(_KEYS))}")
    amount, currency, day = table.get("per_hour"), table.get("currency"), table.get("as_of")
    if not isinstance(amount, int | float) or isinstance(amount, bool) or not 0 < amount < _MOST:
        raise ConfigError(_DOING, f"{place}: per_hour = {amount!r}", "an amount above 0, below a billion")
    if not isinstance(currency, str) or not re.fullmatch("[A-Z]{3}", currency):
        raise ConfigError(_DOING, f"{place}: currency = {currency!r}", 'three capital letters, such as "USD"')
    if isinstance(day, datetime) or not isinstance(day, date):
        raise ConfigError(_DOING, f"{place}: as_of = {day!r}", "the day of the price, such as as_of = 2026-11-20")
    if day > today:
        raise ConfigError(_DOING, f"{place}: as_of = {day}", f"a day until {today}")
    return Price(float(amount), currency, day)


def with_costs(answer: RehearsalAnswer, train_steps: int | None, prices: Prices | None) -> RehearsalAnswer:
    """Return an answer with the hours of its run, and its cost where there is a price.

    Args:
        train_steps: What the user says that it makes; None: as many as the script says.
    """
    run, time = answer.run, answer.work.step_time if answer.work is not None else None
    if run is None:
        return answer
    if train_steps is not None:
        run = run.model_copy(update={"steps": train_steps, "source": "--train-steps"})
    if run.steps is not None and time is not None:
        hours = run_hours(time, run.steps, run.batch_share)
        run = run.model_copy(update={"hours": hours, "cost": cost_of(hours, answer.ranks, answer.device, prices)})
    return answer.model_copy(update={"run": run})


def cost_of(hours: Interval, devices: int, device: DeviceSpec, prices: Prices | None) -> RunCost | None:
    """Return what hours of some devices cost; None: there is no price of them."""
    price = prices.of(device) if prices is not None else None
    return _cost(hours, devices, price, prices.today) if prices and price else None


def _cost(hours: Interval, devices: int, price: Price, today: date) -> RunCost:
    each = devices * price.per_hour
    return RunCost(
        estimate=each * hours.estimate,
        low=each * hours.low,
        high=each * hours.high,
        currency=price.currency,
        per_hour=price.per_hour,
        as_of=price.as_of.isoformat(),
        is_old=(today - price.as_of).days > _OLD_DAYS,
    )
