"""The page of settings says what the types say."""

from dryfit.settings.choices import Metric
from dryfit.settings.study_file_text import SEARCHABLE
from settings_page import PAGE, render


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == render(page), "write it anew: see tests/support/settings_page.py"


def test_every_key_and_metric_stands_there_with_a_sentence() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for key in SEARCHABLE:
        table, _, name = key.partition(".")
        section = page.split(f"## `[{table}]`")[1].split("\n## ")[0]
        (row,) = [line for line in section.splitlines() if line.startswith(f"| `{name}` |")]
        assert all(len(cell.strip()) > 2 for cell in row.split(" | ")[1:]), row
    assert all(f"| `{metric}` |" in page for metric in Metric)
