"""The page of settings says what the types say."""

from dryfit.settings.choices import Metric
from settings_page import PAGE, render


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == render(page), "write it anew: see tests/support/settings_page.py"


def test_every_metric_stands_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{metric}` |" in page for metric in Metric)
