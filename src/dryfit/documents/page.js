"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function themed(layout) {
    const line = color("--line"), narrow = window.innerWidth < 560;
    const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line };
    const full = Object.assign({ height: 380 }, layout);
    full.paper_bgcolor = full.plot_bgcolor = "rgba(0,0,0,0)";
    full.font = { family: "system-ui, sans-serif", size: narrow ? 11 : 13, color: color("--ink") };
    full.margin = { l: narrow ? 44 : 60, r: 12, t: 12, b: 48 };
    full.legend = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" };
    full.hoverlabel = { bgcolor: color("--card"), bordercolor: line, font: { color: color("--ink") }, align: "left" };
    full.dragmode = window.matchMedia("(pointer: coarse)").matches ? false : "zoom";
    for (const name of ["xaxis", "yaxis"]) full[name] = Object.assign({ automargin: true }, axis, full[name]);
    return full;
  }

  function draw() {
    for (const place of document.querySelectorAll("[data-figure]")) {
      const figure = figures[Number(place.dataset.figure)];
      Plotly.react(place, figure.data, themed(figure.layout), { responsive: true, displaylogo: false, displayModeBar: false });
    }
  }
  draw();
  dark.addEventListener("change", draw);

  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
      } catch {
        const range = document.createRange();
        range.selectNodeContents(source);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  for (const head of document.querySelectorAll("th")) {
    head.addEventListener("click", () => {
      const body = head.closest("table").tBodies[0], at = head.cellIndex;
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = new Intl.Collator("en", { numeric: true }).compare;
      const rows = Array.from(body.rows).map((row) => [row.cells[at].textContent, row]);
      const numbers = rows.every(([text]) => text === "-" || !Number.isNaN(Number(text)));
      const worth = (text) => (text === "-" ? -Infinity : Number(text));
      rows.sort(([a], [b]) => (up ? 1 : -1) * (numbers ? worth(a) - worth(b) || 0 : order(a, b)));
      for (const [, row] of rows) body.append(row);
    });
  }
})();
