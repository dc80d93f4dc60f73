"""The tables of the page of a trial's settings, rendered from the types that check them.

Run this file to write the page anew: ``PYTHONPATH=src:tests/support python tests/support/settings_page.py``.
"""

import json
import re
from enum import Enum
from pathlib import Path

from dryfit.settings.choices import Metric
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_text import TABLES, key_description, legal_values
from dryfit.settings.tables import TRIAL_NEEDS, DataSettings, Settings, TrialSettings
from dryfit.settings.task_facts import BUILT_IN, OWN_TABLE, metrics_of_classes, reads

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

_CLASSES = "\n## Classes\n"
"""What follows the tables."""
_METRIC = re.compile(r"^\| `(\w+)` \| ([^|]+) \|.*$", re.MULTILINE)


def render(page: str) -> str:
    """Return the page with its tables written anew; the prose around them, and what each metric is, are its own."""
    prose, _, behind = page.partition(_CLASSES)
    tables = "\n".join(_table(table) for table in ("data", *TrialSettings.model_fields))
    definitions, head, metrics = behind.partition("\n## Metrics\n")
    return prose.partition("## `[")[0] + tables + _CLASSES + definitions + head + _METRIC.sub(_metric, metrics)


def _metric(row: re.Match[str]) -> str:
    metric = Metric(row[1])
    return f"| `{metric}` | {row[2]} | {_tasks(metric)} | {_whose(metric)} |"


def _table(table: str) -> str:
    if table == OWN_TABLE:
        said = "their names, defaults and types are its own ([own-task.md](own-task.md))"
        return f"## `[{table}]`\n\n{key_description((table,)).capitalize().rstrip('.')}: {said}.\n"
    lines = [f"## `[{table}]`", "", key_description((table,)).capitalize() + _readers(table), ""]
    lines += ["| key | default | takes | what |", "|---|---|---|---|"]
    needs = {one.key: one.condition for one in TRIAL_NEEDS}
    for key in TABLES[table]:
        what = key_description((table, key))
        if f"{table}.{key}" in needs:
            what += f". Read with {needs[f'{table}.{key}']}"
        lines.append(f"| `{key}` | {_default(table, key)} | {legal_values((table, key))} | {what} |")
    return "\n".join(lines) + "\n"


def _default(table: str, key: str) -> str:
    settings: Settings = getattr(StudyConfig(), table)
    value = type(settings).model_fields[key].default
    if value is None:
        return "unset"
    return f"`{json.dumps(value.value if isinstance(value, Enum) else value)}`"


def _readers(table: str) -> str:
    """The tasks that read a table, where not all do."""
    trained = [task for task, facts in BUILT_IN.items() if not facts.calls_function]
    if table not in TrialSettings.model_fields or all(reads(task, table) for task in trained):
        return ""
    return f" Read by {', '.join(task for task in trained if reads(task, table))}."


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
