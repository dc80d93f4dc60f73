"""The table of metrics of the page of a trial's settings, rendered from the types that check them.

Run this file to write the page anew: ``PYTHONPATH=src:tests/support python tests/support/settings_page.py``.
"""

import re
from pathlib import Path

from dryfit.settings.choices import Metric
from dryfit.settings.tables import DataSettings
from dryfit.settings.task_facts import BUILT_IN, metrics_of_classes

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

_METRIC = re.compile(r"^\| `(\w+)` \| ([^|]+) \|.*$", re.MULTILINE)


def render(page: str) -> str:
    """Return the page with its metrics' tasks written anew; what each metric is, and the prose, are its own."""
    prose, head, metrics = page.partition("\n## Metrics\n")
    return prose + head + _METRIC.sub(_metric, metrics)


def _metric(row: re.Match[str]) -> str:
    metric = Metric(row[1])
    return f"| `{metric}` | {row[2]} | {_tasks(metric)} | {_whose(metric)} |"


def _tasks(metric: Metric) -> str:
    kinds = (DataSettings(), DataSettings(num_labels=1))
    return ", ".join(
        task
        for task, facts in BUILT_IN.items()
        if any(metric in facts.metrics(data) for data in (kinds if facts.numbers else kinds[:1]))
    )


def _whose(metric: Metric) -> str:
    if metric not in metrics_of_classes(DataSettings()):
        return "|"
    of_two, of_more = (metric in metrics_of_classes(DataSettings(num_labels=classes)) for classes in (2, 3))
    several = metric in metrics_of_classes(DataSettings(num_labels=3, multi_label=True))
    return f"{'yes' if of_more else 'two classes' if of_two else 'no'} | {'yes' if several else 'no'}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
