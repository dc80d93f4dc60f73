"""The page about a rehearsal: memory over time, phases, holders; nothing of the script becomes markup."""

import json
import re

from dryfit.documents.pages import render
from dryfit.documents.rehearsals import rehearsal_page, timeline_figure
from dryfit.settings.memory_terms import DeviceSpec
from rehearsal_stand_in import GIB, answer_of, memory_of

DEVICE = DeviceSpec(name="rtx4090", capacity_bytes=24 * GIB)


def test_the_timeline_has_phases_and_says_who_holds_what() -> None:
    figure = timeline_figure(memory_of(4 * GIB).timeline, DEVICE.capacity_bytes)
    names = [trace["name"] for trace in figure["data"]]
    assert names == ["allocated", "reserved", "device", "load", "forward", "backward", "optimizer"]
    allocated = figure["data"][0]
    assert max(allocated["y"]) == 6.0
    assert len(allocated["x"]) == len(allocated["text"]) == 12
    at = allocated["text"][allocated["y"].index(6.0)]
    assert at.startswith("6.0 GiB allocated, 6.1 GiB reserved<br>step 1, backward<br>model.layers.3.mlp<br>train.py:88")
    bands = figure["layout"]["shapes"]
    assert len(bands) == 12
    assert all(band["x0"] <= band["x1"] for band in bands)


def test_the_page_is_whole_and_asks_for_nothing() -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    html = render(rehearsal_page(answer_of(40 * GIB, DEVICE), f"train.py {evil}", made_at_s=0.0))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and policy[1].startswith("default-src 'none';")
    assert evil not in html and "&lt;img src=x" in html
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', html, re.DOTALL)[1])
    assert len(figures) == html.count("data-figure=") == 3
    for part in (
        "dryfit rehearse",
        "rehearsal does not fit: the script needs 42.9 GiB",
        "out of memory in step 1",
        "modeling_qwen2.py:312",
        "What is held at the peak",
        "memory grows by 1.0 GiB a step",
    ):
        assert part in html, part


def test_a_script_that_could_not_run_has_a_page_too() -> None:
    answer = answer_of(GIB, DEVICE).model_copy(
        update={"end": "failed", "memory": None, "traceback": "KeyError: 'x'", "reasons": ("KeyError: 'x'",)}
    )
    html = render(rehearsal_page(answer, "train.py", made_at_s=0.0))
    assert "could not run" in html and "KeyError" in html
