"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLORS = ["#3366aa", "#dd8833", "#338855", "#bb4444", "#7755aa", "#118899", "#997733", "#cc5599", "#667788", "#77aa22"];
  const DASHES = [[], [6, 4], [2, 3]];
  const LINE_COLOR = "#222222";
  const HEIGHT = 260;
  const sync = uPlot.sync("reports");
  const hidden = new Set();
  let charts = [];
  let axis = "step";
  let smoothing = 1;

  const color = (run) => COLORS[run % COLORS.length];
  const dash = (run) => DASHES[Math.floor(run / COLORS.length) % DASHES.length];
  const make = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const swatch = (run) => {
    const mark = make("span", { className: "swatch" });
    mark.style.borderTopColor = color(run);
    if (dash(run).length) mark.style.borderTopStyle = "dashed";
    return mark;
  };
  const number = (value) => {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(5)));
  };

  /** Centered moving average over `smoothing` values, fewer at both ends. */
  function smooth(values) {
    const half = Math.floor(smoothing / 2);
    return values.map((_, index) => {
      const part = values.slice(Math.max(0, index - half), index + half + 1);
      return part.reduce((sum, value) => sum + value, 0) / part.length;
    });
  }

  /** [x, y, standard error] of one run's metric: rows that have both, in order of x. */
  function points(run, key) {
    const xs = run.columns[axis], ys = run.columns[key], errors = run.columns[key + "/stderr"];
    const found = [[], [], []];
    if (!xs || !ys) return found;
    ys.forEach((y, row) => {
      if (y == null || xs[row] == null) return;
      found[0].push(xs[row]);
      found[1].push(y);
      found[2].push(errors ? errors[row] : null);
    });
    if (smoothing > 1 && data.metrics[key].smooth) found[1] = smooth(found[1]);
    return found;
  }

  /** Vertical bars of one standard error to each side, under the lines. */
  function drawErrors(plot, errors) {
    const context = plot.ctx;
    context.save();
    context.lineWidth = 1.5 * devicePixelRatio;
    errors.forEach(([xs, ys, deviations], run) => {
      if (!plot.series[run + 1].show) return;
      context.strokeStyle = color(run);
      context.globalAlpha = 0.8;
      context.beginPath();
      xs.forEach((x, index) => {
        if (deviations[index] == null) return;
        const left = plot.valToPos(x, "x", true);
        context.moveTo(left, plot.valToPos(ys[index] - deviations[index], "y", true));
        context.lineTo(left, plot.valToPos(ys[index] + deviations[index], "y", true));
      });
      context.stroke();
    });
    context.restore();
  }

  /** Of the y axis: all values with their errors, and some room; a constant curve lies in the middle. */
  function yRange(found, low, high) {
    if (low == null) return [0, 1];
    found.forEach(([, ys, errors]) => ys.forEach((y, index) => {
      if (errors[index] == null) return;
      low = Math.min(low, y - errors[index]);
      high = Math.max(high, y + errors[index]);
    }));
    if (low === high) return [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
    return uPlot.rangeNum(low, high, 0.08, true);
  }

  function draw(key, box) {
    const metric = data.metrics[key];
    const found = data.runs.map((run) => points(run, key));
    const lines = data.lines.filter((line) => line.metric === key);
    const joined = uPlot.join(found.map(([xs, ys]) => [xs, ys]));
    const inside = (line, x) => {
      const [low, high] = line.window[axis];
      return (low == null || x >= low) && (high == null || x <= high);
    };
    lines.forEach((line) => joined.push(joined[0].map((x) => inside(line, x) ? line.value : null)));
    const few = (run) => found[run][0].length <= 30;
    const isLog = metric.log && found.some(([, ys]) => ys.some((y) => y > 0));
    if (isLog) joined.slice(1).forEach((ys) => ys.forEach((y, index) => { if (y != null && y <= 0) ys[index] = null; }));
    const series = [
      { label: axis, value: (_, value) => number(value) },
      ...data.runs.map((run, index) => ({
        label: run.name, stroke: color(index), dash: dash(index), width: 1.6, spanGaps: true,
        show: !hidden.has(index), points: { show: few(index), size: 5 }, value: (_, value) => number(value),
      })),
      ...lines.map((line) => ({
        label: line.label, stroke: LINE_COLOR, dash: [3, 4], width: 1.4, spanGaps: true,
        points: { show: joined[0].filter((x) => inside(line, x)).length === 1, size: 7 }, value: (_, value) => number(value),
      })),
    ];
    const plot = new uPlot({
      width: box.clientWidth, height: HEIGHT, series,
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: (_, low, high) => yRange(found, low, high) } },
      axes: [
        { label: data.axes[axis], labelSize: 20, size: 34 },
        { size: 62, values: (_, ticks) => ticks.map(number) },
      ],
      cursor: { sync: { key: sync.key, setSeries: false }, focus: { prox: 24 }, drag: { x: true, y: false } },
      focus: { alpha: 0.35 },
      hooks: { drawClear: [(self) => drawErrors(self, found)] },
    }, joined, box);
    return plot;
  }

  function addChart(grid, key) {
    if (grid.querySelector(`[data-key="${CSS.escape(key)}"]`)) return;
    const metric = data.metrics[key];
    const box = make("div", { className: "chart" });
    box.dataset.key = key;
    box.append(make("h3", { title: metric.meaning }, key + " ", make("span", { className: "note" }, metric.unit)));
    grid.append(box);
    charts.push({ key, box, plot: draw(key, box) });
  }

  function redraw() {
    charts.forEach((chart) => {
      chart.plot.destroy();
      chart.plot = draw(chart.key, chart.box);
    });
  }

  function showRuns() {
    const list = document.getElementById("runs");
    data.runs.forEach((run, index) => {
      const check = make("input", { type: "checkbox", checked: true });
      check.addEventListener("change", () => {
        if (check.checked) hidden.delete(index); else hidden.add(index);
        charts.forEach(({ plot }) => plot.setSeries(index + 1, { show: check.checked }));
      });
      list.append(make("label", {}, check, " ", swatch(index), run.name + " ",
        make("span", { className: "note" }, run.varied)));
    });
    document.querySelectorAll(".run").forEach((place) => place.prepend(swatch(Number(place.dataset.run))));
  }

  function showControls(moreGrid) {
    const axes = document.getElementById("axis"), more = document.getElementById("more");
    Object.entries(data.axes).forEach(([key, what]) => axes.append(make("option", { value: key }, what)));
    axes.addEventListener("change", () => { axis = axes.value; redraw(); });
    const smoothness = document.getElementById("smoothing");
    smoothness.addEventListener("change", () => { smoothing = Number(smoothness.value); redraw(); });
    Object.keys(data.metrics).forEach((key) => more.append(make("option", { value: key }, key)));
    more.addEventListener("change", () => {
      if (!more.value) return;
      moreGrid.parentElement.hidden = false;
      addChart(moreGrid, more.value);
      moreGrid.lastElementChild.scrollIntoView({ block: "center" });
      more.value = "";
    });
  }

  function section(title) {
    const grid = make("div", { className: "charts" });
    const place = make("section", {}, make("h2", {}, title), grid);
    document.getElementById("charts").append(place);
    return grid;
  }

  showRuns();
  Object.entries(data.sections).forEach(([title, keys]) => {
    if (!keys.length) return;
    const grid = section(title);
    keys.forEach((key) => addChart(grid, key));
  });
  const moreGrid = section("More");
  moreGrid.parentElement.hidden = true;
  showControls(moreGrid);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    charts.forEach(({ plot, box }) => plot.setSize({ width: box.clientWidth, height: HEIGHT }));
  });
})();
