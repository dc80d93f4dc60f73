"""PyTorch's own viewer of memory snapshots (pytorch.org/memory_viz) in a real browser: what each of its views draws.

The environment variable VIZ names a folder with MemoryViz.js (and the files beside it) of torch/utils/viz in PyTorch's
repository, and in node_modules the npm package d3 of the version that its first line imports.
"""

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from browser import document_of

IS_THERE = pytest.mark.skipif("VIZ" not in os.environ, reason="no folder with PyTorch's viewer: `make viz VIZ=FOLDER`")
TIMELINE, HISTORY, SEGMENTS = "Active Memory Timeline", "Allocator State History", "Active Cached Segment Timeline"

# Each view is chosen, drawn in the next frame, and read: what its text says after each event was clicked, or after the
# mouse was over each polygon; and for a history how many segments and blocks each event leaves, and of what these are.
_LOOK = """
const seen = {}, menu = view.node();
for (const {text} of [...menu.options]) {
  menu.value = text;
  menu.dispatchEvent(new Event('change'));
  await new Promise(requestAnimationFrame);
  const drawn = document.body.lastElementChild, [told, ...events] = drawn.querySelectorAll('pre');
  const [main] = drawn.querySelectorAll('svg'), isHistory = text === 'HISTORY';
  const groups = () => [...main.querySelectorAll('g > g')].map(group => group.querySelectorAll('rect'));
  const after = (kind, one) => {
    one.dispatchEvent(new MouseEvent(kind, {bubbles: true}));
    return told.textContent;
  };
  const over = all => [...all].map(one => after('mouseover', one));
  seen[text] = !main ? {texts: [told.textContent]} : isHistory ? {
    texts: events.map(one => after('mousedown', one)),
    drawn: events.map(one => after('mousedown', one) && groups().map(rects => rects.length)),
    blocks: over(groups()[1]),
  } : {texts: over(main.querySelectorAll('polygon'))};
}
const kept = document.createElement('template');
kept.setAttribute('data-seen', btoa(unescape(encodeURIComponent(JSON.stringify(seen)))));
document.head.append(kept);
""".replace("HISTORY", HISTORY)

# The viewer prints what it reads; and a headless browser need not draw a next frame while its clock runs ahead.
_QUIET = "console.log = () => {}; window.requestAnimationFrame = draw => setTimeout(draw);"


def views_of(snapshot: bytes, folder: Path) -> dict[str, Any]:
    """Return what the views of a snapshot's file draw and say, by their names."""
    viz = Path(os.environ["VIZ"])
    code = "".join(file.read_text() for file in sorted(viz.glob("*.js"), key=lambda file: file.name == "MemoryViz.js"))
    # No network: names of d3 come from its own script, those of files beside are in the same module.
    code = re.sub(r'import (?:\* as )?(\{[^}]*\}|d3) from "https://[^"]*";', r"const \1 = globalThis.d3;", code)
    code = re.sub(r'import \{[^}]*\} from "\./[^"]*";', "", code).replace("</script", r"<\/script")
    data = json.dumps([{"name": "s.pickle", "base64": base64.b64encode(snapshot).decode()}])
    d3 = (viz / "node_modules" / "d3" / "dist" / "d3.min.js").read_text()
    page = folder / "viz.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><body><script>{d3};{_QUIET}</script>"
        f"<script type=module>{code}\nadd_local_files({data}, '{TIMELINE}');\n{_LOOK}</script>",
        encoding="utf-8",
    )
    found = re.search(r'data-seen="([^"]*)"', document_of(page, folder))
    assert found, "the page's script did not come to its end"
    return json.loads(base64.b64decode(found[1]))
