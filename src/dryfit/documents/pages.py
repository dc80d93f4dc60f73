"""A page as one self-contained HTML file, and the parts of its figures as plotly's JSON."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from markupsafe import Markup

from dryfit.documents.document import Document, asset, document_of, look, templates, time_text
from dryfit.settings.errors import ConfigError
from dryfit.settings.text import Table
from dryfit.settings.version import VERSION

# The parts of figures. The page sets the colours of text, axes and background.
#
# Texts are escaped here, because plotly interprets some HTML tags in labels.


Figure: TypeAlias = dict[str, Any]
"""``{"data": [...], "layout": {...}}``, as plotly.js takes it."""

BLUE, ORANGE, RED, PURPLE, GREY, GREEN = "#3987c9", "#e08a1e", "#d64541", "#9a6fc4", "#8c95a0", "#2f9e6e"
"""Distinguishable with red-green colour blindness, and readable on white and on black."""


def text(value: object) -> str:
    """Escape a text for plotly's labels."""
    return html.escape(str(value), quote=False)


def scatter(
    x: Iterable[object], y: Iterable[object], *, name: str, mode: str = "lines", hover: str = "", **look: object
) -> Figure:
    """Return points, or the line through them; an empty ``hover`` says nothing where the pointer is."""
    return {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y), **_hovered(hover), **look}


def bars(x: Iterable[object], y: Iterable[object], *, hover: str, color: str, **look: object) -> Figure:
    """Return horizontal bars."""
    own = {"type": "bar", "orientation": "h", "x": list(x), "y": list(y), "marker": {"color": color}}
    return {**own, **_hovered(hover), **look}


def _hovered(template: str) -> Figure:
    return {"hovertemplate": f"{template}<extra></extra>"} if template else {"hoverinfo": "skip"}


def axis(title: str, **more: object) -> Figure:
    """Return an axis with its title."""
    return {"title": {"text": title}, **more}


def region(since: float, until: float, color: str, **more: object) -> Figure:
    """Return a rectangle behind the whole height of a figure."""
    place = {"x0": since, "x1": until, "y0": 0, "y1": 1, "xref": "x", "yref": "paper", "layer": "below"}
    return {"type": "rect", **place, "fillcolor": color, **more}


MARK = '<meta name="generator" content="dryfit report">'
"""The line that marks a file as a report."""

_HEAD_BYTES = 1024


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
    # Only a page needs it, and its import takes long.
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]  # plotly has no types

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


def refuse_foreign(target: Path, mark: bytes = MARK.encode(), kind: str = "report") -> None:
    """Refuse to replace anything but an earlier file of the same kind.

    Args:
        target: Where a file is to be written.
        mark: What stands at the beginning of every file of the kind, and of no other.
        kind: What it is.

    Raises:
        ConfigError: There is something else.
    """
    if not target.exists():
        return
    head = b""
    if target.is_file():
        with target.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    if mark not in head:
        what = "there is a folder" if target.is_dir() else f"there is a file that is no {kind} of dryfit"
        raise ConfigError(f"writing the {kind} to {target}", what, f"a new file, or an earlier {kind}")
