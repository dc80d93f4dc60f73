"""Texts made from the templates beside this module: model cards and programs that open a saved model."""

import json
from collections.abc import Mapping
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

_ENVIRONMENT = Environment(
    undefined=StrictUndefined,  # a misspelt name is an error; `huggingface_hub.ModelCard.from_template` leaves a gap
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # Markdown and Python, not HTML
)
_ENVIRONMENT.filters["json"] = json.dumps


def render(template: str, facts: Mapping[str, object]) -> str:
    """Return a template's text with its names filled in; the file is ``TEMPLATE.jinja``."""
    text = files(__package__ or "").joinpath(f"{template}.jinja").read_text("utf-8")
    return _ENVIRONMENT.from_string(text).render(facts)
