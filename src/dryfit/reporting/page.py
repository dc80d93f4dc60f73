"""Renders a report page as one self-contained HTML file.

The template engine escapes every text. A content security policy allows no request, and only the scripts of this file,
by their hashes.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]  # plotly has no types

from dryfit.core.text.table import Table
from dryfit.core.version import VERSION
from dryfit.reporting.document import Document, asset, document_of, look, templates, time_text
from dryfit.reporting.plots import Figure

MARK = '<meta name="generator" content="dryfit report">'
"""The line that marks a file as a report."""


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the page; ``warnings`` are above the figures, ``notes`` below them."""

    anchor: str
    title: str
    texts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    charts: tuple[Figure, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    code: str = ""
    notes: tuple[str, ...] = ()


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
    verdict: str
    tiles: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    source: str
    made_at_s: float
    kind: str = "dryfit report"


@document_of.register
def _(page: Page) -> Document:
    """Return the verdict of a report, its key figures and its first tables."""
    tiles = Table(tuple(name for name, _ in page.tiles), (tuple(value for _, value in page.tiles),))
    shown = [
        block
        for section in page.sections
        if section.anchor in ("best", "baselines", "outcomes")
        for caption, table in section.tables
        for block in (caption or section.title, table)
    ]
    return Document((f"report of {page.title}", page.subtitle, page.verdict, tiles, *shown))


def render(page: Page) -> str:
    """Return the HTML of a page."""
    figures = [figure for section in page.sections for figure in section.charts]
    plotly, script = get_plotlyjs(), asset("page.js")
    assets = {
        "style": Markup(asset("page.css")),
        "plotly": Markup(plotly),
        "script": Markup(script),
        "hashes": Markup(" ".join(_hash(text) for text in (plotly, script))),
    }
    template = templates().get_template("page.html")
    return template.render(
        page=page,
        figures=Markup(_script_json(figures)),
        assets=assets,
        look=look,
        version=VERSION,
        made_at=time_text(page.made_at_s),
    )


def _hash(script: str) -> str:
    """Return the hash of a script for a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _script_json(value: Sequence[Figure]) -> str:
    """Return JSON that is safe inside an HTML script: no end tag, comment or character reference."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
