"""The reference pages of the site, made of the code: commands, study file, Python names, JSON answers.

``mkdocs.yml`` names ``site_hooks.py``, which adds these pages to those of docs/; nothing of them is committed.
"""

import json
import re
from typing import Final

import typer
from typer.cli import get_docs_for_click

import dryfit
from dryfit.documents.command_line import app
from dryfit.settings.study_file_text import CASE_KEYS, TABLES, key_description, legal_values, study_json_schema
from dryfit.settings.tables import TRIAL_NEEDS, TrialSettings
from dryfit.settings.task_facts import BUILT_IN, OWN_TABLE, reads
from json_answers import json_page

_SCHEMA: Final = study_json_schema()


def command_page() -> str:
    """Return the page of all commands with their arguments and options."""
    group = typer.main.get_command(app)
    page = get_docs_for_click(obj=group, ctx=typer.Context(group, info_name="dryfit"), name="dryfit", title="Commands")
    head, listed, _ = page.partition("**Commands**:\n")
    _, first, rest = page.partition("## `dryfit ")
    names = re.findall(r"^## `dryfit ([\w-]+)`\n\n(.*)", first + rest, re.MULTILINE)
    links = "\n".join(f"* [`dryfit {name}`](#dryfit-{name}): {said}" for name, said in names)
    body = re.sub(r"\n(Presets:\n(?:  .*\n)+)", r"\n```text\n\1```\n", first + rest)
    return f"{head}{listed}\n{links}\n\n{body}"


def study_file_page() -> str:
    """Return the page of all tables of a study file with their keys."""
    head = """# Study file

Every table and key of `study.toml`, with its default and what the key takes. `dryfit schema` prints the same as a JSON
schema. Keys of the tables marked *searchable* may also stand in `[space]`.
"""
    return "\n".join([head, *(_table(table) for table in TABLES), _space()])


def _table(table: str) -> str:
    if table == OWN_TABLE:
        return f"## `[{table}]`\n\n{_sentence(key_description((table,)))} The task class defines its keys.\n"
    lines = [f"## `[{table}]`", "", _sentence(key_description((table,))) + _readers(table), ""]
    lines += ["| key | default | takes | what |", "|---|---|---|---|"]
    needs = {one.key: one.condition for one in TRIAL_NEEDS}
    for key in TABLES[table]:
        what = key_description((table, key))
        if f"{table}.{key}" in needs:
            what += f". Read with {needs[f'{table}.{key}']}"
        lines.append(f"| `{key}` | {_default(table, key)} | {_cell(legal_values((table, key)))} | {_cell(what)} |")
    return "\n".join(lines) + "\n"


def _readers(table: str) -> str:
    """Say of a table that trials read whether its keys can be searched, and which tasks read them, where not all do."""
    if table not in TrialSettings.model_fields:
        return ""
    trained = [task for task, facts in BUILT_IN.items() if not facts.calls_function]
    read_by = [task for task in trained if reads(task, table)]
    return " *Searchable.*" + (f" Read by {', '.join(read_by)}." if len(read_by) < len(trained) else "")


def _space() -> str:
    lines = ["## `[space]`", "", f"{_sentence(key_description(('space',)))} Keys of a case:", ""]
    lines += ["| key | takes |", "|---|---|"]
    lines += [f"| `{key}` | {_cell(legal_values(('space', 'KEY', key)))} |" for key in CASE_KEYS]
    return "\n".join(lines) + "\n"


def _default(table: str, key: str) -> str:
    """Return the default of a key as a study file has it."""
    node = _SCHEMA["properties"][table]
    node = _SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    if key in node.get("required", ()):
        return "required"
    value = node["properties"][key].get("default")
    return "unset" if value is None else _cell(f"`{_toml(value)}`")


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
        case _:
            return str(value)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _cell(text: str) -> str:
    """A text for a cell of a table, on one line."""
    told = re.sub(r"text that matches (\S+)", r"text that matches `\1`", " ".join(text.split()))
    return told.replace("|", "\\|").replace("<", "&lt;").replace("``", "`")


def python_page() -> str:
    """Return the page of the public names of ``dryfit``: mkdocstrings fills the directives."""
    head = """# Python

The public names of `dryfit`. Each is imported on first use; `import dryfit` alone imports neither torch nor Optuna.
"""
    names = sorted(set(dryfit.__all__) - {"__version__", "events"}, key=str.lower)
    parts = [f"::: dryfit.{name}" for name in names]
    events = "## `dryfit.events`\n\nThe types of the events that an [observer](../observers.md) receives."
    options = "    options:\n      members: true\n      show_root_heading: false"
    modules = [events, f"::: dryfit.ledger.event_types\n{options}", "## `dryfit.__version__`\n\nThe version, as text."]
    return "\n\n".join([head, *parts, *modules]) + "\n"


PAGES: Final = {
    "reference/commands.md": command_page,
    "reference/study-file.md": study_file_page,
    "reference/python.md": python_page,
    "reference/json.md": json_page,
}
"""The text of each page by its place in docs/."""
