"""Renders a report page as one self-contained HTML file.

The template engine escapes every text. A content security policy allows no request, and only the scripts of this file,
by their hashes.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]  # plotly has no types

from dryfit.core.version import VERSION
from dryfit.reporting.html.plots import Figure
from dryfit.reporting.html.sections import Section
from dryfit.reporting.html.verdict import StudyVerdict
from dryfit.reporting.terminal.tables import time_text

MARK = '<meta name="generator" content="dryfit report">'
"""The line that marks a file as a report."""

_LONG_CELL = 60
_MEASURED = re.compile(r"-|-?[\d.,]+(?:e[+-]?\d+)?%?(?: (?:s|h|min|[KMG]iB))?")


@dataclass(frozen=True, slots=True)
class Page:
    """The contents of a report page.

    Attributes:
        title: The study's name.
        subtitle: One line below the title.
        tiles: Names and values of the key figures.
        source: The file the page was made from.
        made_at_s: Unix time.
        kind: What the page is.
    """

    title: str
    subtitle: str
    verdict: StudyVerdict
    tiles: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    source: str
    made_at_s: float
    kind: str = "dryfit report"


def render(page: Page) -> str:
    """Return the HTML of a page."""
    figures = [figure for section in page.sections for figure in section.charts]
    plotly, script = get_plotlyjs(), _asset("page.js")
    assets = {
        "style": Markup(_asset("page.css")),
        "plotly": Markup(plotly),
        "script": Markup(script),
        "hashes": Markup(" ".join(_hash(text) for text in (plotly, script))),
    }
    template = _templates().get_template("page.html")
    return template.render(
        page=page,
        figures=Markup(_script_json(figures)),
        assets=assets,
        look=_look,
        version=VERSION,
        made_at=time_text(page.made_at_s),
    )


def render_card(card: object) -> str:
    """Return lines and tables (``title``, ``lines``, ``tables``) as a fragment of HTML without scripts."""
    return _templates().get_template("page.card.html").render(card=card, look=_look)


def _templates() -> Environment:
    """Return what loads the templates of this package; it escapes every text."""
    return Environment(autoescape=True, undefined=StrictUndefined, loader=FunctionLoader(_asset))


def _asset(name: str) -> str:
    return files("dryfit.reporting.html").joinpath(name).read_text(encoding="utf-8")


def _look(cell: str) -> str:
    """Return the class of a table cell by what it says."""
    if _MEASURED.fullmatch(cell):
        return "number"
    return "long" if len(cell) > _LONG_CELL else ""


def _hash(script: str) -> str:
    """Return the hash of a script for a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _script_json(value: Sequence[Figure]) -> str:
    """Return JSON that is safe inside an HTML script: no end tag, comment or character reference."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
