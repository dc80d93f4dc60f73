"""The page about a rehearsal as a browser shows it: figures are drawn, with phases, holders and what they are."""

import re
from pathlib import Path

import pytest

from browser import document_of, picture_of
from dryfit.documents.pages import render
from dryfit.documents.rehearsals import rehearsal_page
from dryfit.settings.memory_terms import DeviceSpec
from rehearsal_stand_in import GIB, answer_of

pytestmark = pytest.mark.heavy


def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    answer = answer_of(40 * GIB, DeviceSpec(name="rtx4090", capacity_bytes=24 * GIB))
    page = tmp_path / "page.html"
    page.write_text(render(rehearsal_page(answer, "train.py --lr 1e-4")), encoding="utf-8")
    document = document_of(page, tmp_path)
    drawn = re.findall(r'<div class="chart js-plotly-plot"', document)
    assert len(drawn) == 3
    assert document.count('class="main-svg"') >= 3
    legend = re.findall(r'class="legendtext"[^>]*>([^<]*)<', document)
    assert legend[:7] == ["allocated", "reserved", "device", "load", "forward", "backward", "optimizer"]
    assert "allocations and frees" in document
    assert len(re.findall(r"<path[^>]*fill-opacity: 1[^>]*stroke-width: 0px", document)) >= 12  # bands of phases
    for label in ("modeling_qwen2.py:312 activations", "train.py:12 weights", "outside of modules"):
        assert label in document, label
    assert picture_of(page, tmp_path).stat().st_size > 20_000
