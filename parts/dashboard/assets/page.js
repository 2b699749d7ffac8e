"use strict";
// Shows what `/data` answers, or what the page holds. Whatever a run says is put into the page as text, never as HTML.

const $ = (id) => document.getElementById(id);
const held = JSON.parse($("data").textContent);
const chosen = { focus: 0, drawn: null, sort: { head: "run", down: false }, axis: "step", scale: "linear", figure: "step_ms", find: "", log: "" };
const charts = new Map(); // key -> {plot, signature, host, zoomed}
let runs = [];
let lost = "";
let timer = 0;

const FIGURES = { step_ms: "step, ms", own_ms: "own, ms", input_wait_ms: "input, ms", reduce_wait_ms: "reduction, ms",
  gradient_norm: "gradient norm", staleness: "staleness, updates", lag: "lag, steps" };
const RATES = { examples_per_sec: "examples a second", steps_per_sec: "steps a second", learning_rate: "learning rate",
  input_wait_fraction: "share of time that waits for input", reduce_fraction: "share of time in reduction", memory_mb: "memory, MiB" };
const SPENT = { steps: "c0", input: "c1", waiting: "c4", checkpoints: "c3", evaluation: "c5", compile: "c6", start: "c2", other: "c8", lost: "c7", down: "fault" };
const MARKS = { checkpoint: "checkpoint", warning: "warning", restart: "fault", fault: "fault" };
const MOST_CURVES = 40, MOST_LANES = 50, COLOURS = 8, MOST_KEYS = 6; // colours of runs; series of a legend
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

// -- Words ------------------------------------------------------------------------------------------------------------

function number(value, digits = 4) {
  if (typeof value !== "number") return value == null ? "–" : String(value);
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}
const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");
function span(seconds) {
  if (typeof seconds !== "number" || !(seconds >= 0)) return "–";
  if (seconds < 59.5) return `${number(Number(seconds.toFixed(3)), seconds < 10 ? 2 : 3)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  return days ? `${days} d ${hours % 24} h` : hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${whole % 60} s`;
}
const moment = (seconds) => new Date(1000 * seconds).toLocaleString("sv");
// Of a time axis: the hour, or the day where one begins.
function hours(at) {
  const [first, second] = at, digits = second - first < 60 ? 8 : 5;
  return at.map((seconds) => { const [day, hour] = moment(seconds).split(" "); return hour === "00:00:00" ? day.slice(5) : hour.slice(0, digits); });
}
const last = (values) => (values || []).findLast((value) => value != null);
// The loss is the first, the gradients' norm the last.
const metricsIn = (columns) => Object.keys(columns).filter((name) => name.startsWith("metrics."))
  .sort((a, b) => (b === "metrics.loss") - (a === "metrics.loss") || (a === "metrics.gradient_norm") - (b === "metrics.gradient_norm"));

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}
function table(element, heads, lines, figures = [], classes = []) {
  const row = (cells, tag) => {
    const made = make("tr");
    made.append(...cells.map((cell, i) => (cell instanceof Node ? cell : make(tag, cell, figures[i] ? "figure" : ""))));
    return made;
  };
  const rows = lines.map((line, i) => Object.assign(row(line, "td"), { className: classes[i] || "" }));
  element.replaceChildren(...(heads.length ? [row(heads, "th")] : []), ...rows);
}
function options(select, names, labels = {}) {
  const value = chosen[select.id];
  if ([...select.options].map((each) => each.value).join("\n") !== names.join("\n"))
    select.replaceChildren(...names.map((name) => Object.assign(make("option", labels[name] || name), { value: name })));
  chosen[select.id] = select.value = names.includes(value) ? value : names[0] || "";
}

// -- Curves, by uPlot -------------------------------------------------------------------------------------------------

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = charts.get(target.dataset.key);
    if (chart && target.clientWidth) chart.plot.setSize({ width: room(target), height: chart.plot.height });
  }
});
const room = (host) => Math.max(80, host.clientWidth - (host.className === "lane" ? 0 : 20));

// series: {label, colour, dash, points, fill, bars}; look: {title, time, elapsed, log, marks, height, bare, keyed, range, span}.
function draw(host, key, data, series, look) {
  const signature = JSON.stringify([series.map((each) => [each.label, each.colour]), look.time, look.elapsed, look.log]);
  const known = charts.get(key);
  if (known && known.signature === signature && known.host === host) {
    Object.assign(known.look, look);
    known.plot.setData(data, !known.zoomed);
    if (known.zoomed) known.plot.redraw();
    return;
  }
  remove(key);
  const chart = { signature, host, look, zoomed: false };
  const axis = (size, space, values) => ({ size, space, values: (_, at) => values(at), stroke: colour("quiet"), font: "11px system-ui", grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), size: 4 } });
  const words = (at) => at.map((value) => (value == null ? "" : value && Math.abs(value) < 1e-3 ? value.toExponential() : compact.format(value)));
  const x = look.time ? axis(28, 70, hours) : axis(28, 55, look.elapsed ? (at) => at.map(span) : words), y = axis(48, 36, words);
  host.dataset.key = key;
  chart.plot = new uPlot({
    title: look.title, width: room(host), height: look.height || 180,
    scales: { x: { time: !!look.time, ...(look.span ? { range: () => chart.look.span } : {}) }, y: look.range ? { range: () => chart.look.range } : { distr: look.log ? 3 : 1 } },
    axes: look.bare ? [{ show: false }, { show: false }] : [x, y],
    legend: { show: !look.bare && !look.keyed },
    cursor: { y: false, drag: { x: !look.bare, y: false }, points: { show: !look.bare } },
    series: [
      { label: look.time || look.elapsed ? "time" : look.x || "step", value: (_, at) => (at == null ? "–" : look.time ? moment(at) : look.elapsed ? span(at) : number(at)) },
      ...series.map((each) => ({
        label: each.label, stroke: colour(each.colour), width: 1.5, dash: each.dash, points: each.points ? { show: true, size: 4 } : { show: undefined },
        fill: each.fill ? colour(each.colour) : undefined, value: (_, value) => number(value),
        paths: each.bars ? uPlot.paths.bars({ size: [0.8, 60] }) : each.steps ? uPlot.paths.stepped({ align: -1 }) : undefined,
      })),
    ],
    hooks: {
      draw: [(plot) => drawMarks(plot, chart.look.marks || [])],
      setSelect: [(plot) => { chart.zoomed = chart.zoomed || plot.select.width > 0; }],
    },
  }, data, host);
  chart.plot.over.addEventListener("dblclick", () => { chart.zoomed = false; });
  charts.set(key, chart);
  sizes.observe(host);
  if (look.bare) return;
  host.tabIndex = 0;
  host.setAttribute("role", "group");
  host.setAttribute("aria-label", look.title);
}
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.textAlign = "left";
  ctx.font = `${11 * devicePixelRatio}px system-ui`;
  let free = 0; // where there is room for the next letter
  for (const { at, kind } of marks) {
    if (!(at >= plot.scales.x.min && at <= plot.scales.x.max)) continue;
    const left = Math.round(plot.valToPos(at, "x", true));
    ctx.strokeStyle = ctx.fillStyle = colour(MARKS[kind]);
    ctx.beginPath();
    ctx.moveTo(left, bbox.top + (kind === "checkpoint" ? bbox.height - 8 * devicePixelRatio : 0));
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    if (kind === "checkpoint" || left < free || bbox.height < 50 * devicePixelRatio) continue;
    ctx.fillText(kind[0].toUpperCase(), left + 3 * devicePixelRatio, bbox.top + 10 * devicePixelRatio);
    free = left + 14 * devicePixelRatio;
  }
  ctx.restore();
}
function remove(key) {
  const chart = charts.get(key);
  if (!chart) return;
  sizes.unobserve(chart.host);
  chart.plot.destroy();
  charts.delete(key);
}
// Removes the charts, with their places, whose key begins so, but those that are kept.
function prune(prefix, kept) {
  for (const [key, { host }] of [...charts]) if (key.startsWith(prefix) && !kept.has(key)) { remove(key); host.remove(); }
}
document.addEventListener("keydown", (event) => {
  const chart = charts.get(event.target.dataset?.key);
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!chart || (!move && event.key !== "Escape")) return;
  event.preventDefault();
  const { plot } = chart, at = plot.data[0];
  if (!move) {
    chart.zoomed = false;
    plot.setData(plot.data);
    return;
  }
  const index = Math.min(at.length - 1, Math.max(0, (plot.cursor.idx ?? at.length) + move));
  plot.setCursor({ left: plot.valToPos(at[index], "x"), top: 10 });
});

// A curve's points with x that grows, as uPlot wants it.
function points(xs, ys, from = 0) {
  const at = new Map();
  (xs || []).forEach((x, i) => { if (x != null && ys[i] != null) at.set(x - from, ys[i]); });
  const sorted = [...at].sort((a, b) => a[0] - b[0]);
  return [sorted.map((each) => each[0]), sorted.map((each) => each[1])];
}
// -- Sections ---------------------------------------------------------------------------------------------------------

const shown = () => runs.map((run, index) => ({ ...run, index })).filter((run) => run.view);
const drawn = () => shown().filter((run) => chosen.drawn.has(run.index));
const flagsOf = (run) => run.view?.latest?.config?.values ?? {};
const flagText = (value) => (typeof value === "string" ? value : typeof value === "number" ? String(Number(value.toPrecision(6))) : JSON.stringify(value) ?? "–");

// What has become of a run: [text, class].
const stateOf = (run) => run.state ?? ["", ""];
const spentBy = (view) => view?.latest?.end?.goodput?.seconds ?? view?.latest?.window?.spent;

function renderRuns() {
  $("runs").hidden = runs.length < 2;
  const known = runs.map(flagsOf).filter((values) => Object.keys(values).length);
  const flags = [...new Set(known.flatMap(Object.keys))].sort().filter((name) => !["run_dir", "result_json"].includes(name) && new Set(known.map((values) => flagText(values[name]))).size > 1);
  const rows = runs.map((run, index) => {
    const values = flagsOf(run), value = run.view?.best?.value, step = run.view?.latest?.end?.step ?? last(run.view?.windows?.step), seconds = spentBy(run.view)?.total;
    const cells = { run: [run.name], best: [number(value), value], step: [number(step), step], state: [stateOf(run)[0]], duration: [span(seconds), seconds] };
    for (const name of flags) cells[name] = [flagText(values[name]), typeof values[name] === "number" ? values[name] : undefined];
    return { index, cells };
  });
  const { head, down } = chosen.sort, key = ({ cells }) => cells[head]?.[1] ?? cells[head]?.[0] ?? "";
  const inOrder = (a, b) => (down ? -1 : 1) * (typeof key(a) === "number" && typeof key(b) === "number" ? key(a) - key(b) : String(key(a)).localeCompare(String(key(b)), "en", { numeric: true }));
  if (!chosen.drawn || (chosen.drawn.isEarly && runs.every((run) => run.view))) { // the best of many, once all are read
    const worse = ({ index, cells }) => (cells.best[1] ?? Infinity) * (runs[index].view?.best?.direction === "max" ? -1 : 1);
    const few = runs.length > COLOURS ? rows.sort((a, b) => worse(a) - worse(b)).slice(0, COLOURS).map((row) => row.index) : runs.map((_, index) => index);
    if (!few.includes(chosen.focus)) few[COLOURS - 1] = chosen.focus;
    chosen.drawn = Object.assign(new Map(few.map((index, colour) => [index, colour])), { isEarly: !runs.every((run) => run.view) });
  }
  const focused = document.activeElement?.id;
  $("runs-head").replaceChildren(make("th"), ...["run", "best", "step", "state", "duration", ...flags].map((name) => {
    const cell = make("th", "", rows.some(({ cells }) => typeof cells[name][1] === "number") ? "figure" : ""), button = Object.assign(make("button", `${name.replaceAll("_", " ")}${name === head ? (down ? " ▾" : " ▴") : ""}`), { id: `sort-${name}` });
    if (name === head) cell.ariaSort = down ? "descending" : "ascending";
    button.addEventListener("click", () => { chosen.sort = { head: name, down: name === head && !down }; render(); });
    cell.append(button);
    return cell;
  }));
  $("runs-rows").replaceChildren(...rows.sort(inOrder).map(({ index, cells }) => {
    const box = Object.assign(make("input"), { type: "checkbox", id: `draw-${index}`, checked: chosen.drawn.has(index), ariaLabel: `curves of ${runs[index].name}` });
    const radio = Object.assign(make("input"), { type: "radio", name: "focus", id: `focus-${index}`, checked: index === chosen.focus });
    const row = make("tr"), ticks = make("td"), name = make("td"), label = make("label"), swatch = make("i", "", "key");
    swatch.style.color = chosen.drawn.has(index) ? `var(--c${chosen.drawn.get(index)})` : "var(--other)";
    box.addEventListener("change", () => {
      const used = new Set(chosen.drawn.values()), free = [...Array(COLOURS).keys()].find((colour) => !used.has(colour)) ?? chosen.drawn.size % COLOURS;
      if (box.checked) chosen.drawn.set(index, free);
      else chosen.drawn.delete(index);
      chosen.drawn.isEarly = false;
      render();
    });
    radio.addEventListener("change", () => { chosen.focus = index; render(); });
    ticks.append(box, swatch);
    label.append(radio, ` ${cells.run[0]}`);
    name.append(label);
    row.append(ticks, name, ...Object.entries(cells).slice(1).map(([head, [text, value]]) => make("td", text, head === "state" ? stateOf(runs[index])[1] : value != null ? "figure" : "")));
    return row;
  }));
  if (focused?.match(/^(sort|draw|focus)-/)) $(focused)?.focus();
}

function renderState(run) {
  const { end, window } = run.view.latest || {};
  const [state, kind] = stateOf(run);
  const stopped = end || run.killed ? [] : [...(run.view.workers ?? []), ...(run.view.servers ?? [])].filter((each) => each.state === "stopped");
  const troubles = [
    stopped.length && `${stopped.slice(0, 3).map((each) => each.name).join(", ")}${stopped.length > 3 ? ` and ${stopped.length - 3} more` : ""} stopped`,
    run.late && state,
  ].filter(Boolean).join("; ");
  const news = lost || (run.read < 1 ? `reading: ${Math.floor(100 * run.read)} %` : "") || run.view.problem ||
    (end || run.killed ? `${run.name} ${state}` : troubles ? `${run.name}: ${troubles}` : window ? `${run.name} runs` : run.name);
  if ($("news").textContent !== news) $("news").textContent = news;
  $("news").className = lost || troubles || kind === "late" ? "late" : window && !end ? "runs" : "";
  for (const row of document.querySelectorAll("#lanes tr, #servers-table tr[class]")) row.classList.toggle("late", run.late);
}

function renderSummary(run) {
  const { view } = run, { latest = {}, windows = {}, evaluations = {}, notes = [] } = view;
  const step = latest.end?.step ?? last(windows.step), until = latest.start?.until_step;
  const saved = notes.findLast((note) => note.event === "checkpoint"), spent = spentBy(view);
  const lines = [
    ["step", step != null && `${number(step)}${until != null ? ` of ${number(until)}` : ""}`],
    ["time left", !latest.end && !run.late && !run.killed && latest.window?.seconds_left != null && `about ${span(latest.window.seconds_left)}`],
    ["goodput", spent?.total > 0 && `${Math.round((100 * spent.steps) / spent.total)} % of ${span(spent.total)}`],
    ["examples a second", last(windows.examples_per_sec)],
    ["steps a second", last(windows.steps_per_sec)],
    ...metricsIn(windows).slice(0, 4).map((name) => [name.slice(8).replaceAll("_", " "), last(windows[name])]),
    ...metricsIn(evaluations).slice(0, 4).map((name) => [`evaluation ${name.slice(8).replaceAll("_", " ")}`, last(evaluations[name])]),
    ["memory", windows.memory_mb && `${number(last(windows.memory_mb))} MiB`],
    ...(view.result?.sections || []).filter((each) => ["Rate", "Baseline"].includes(each.title))
      .flatMap(({ title, rows }) => rows.map(([name, text]) => [`${title.toLowerCase()}: ${name.trim()}`, text])),
  ].filter(([, value]) => value != null && value !== false);
  $("summary").replaceChildren(...lines.map(([name, value]) => {
    const line = make("div");
    line.append(make("dt", name), make("dd", typeof value === "number" ? number(value) : value));
    return line;
  }));
  $("facts").textContent = [
    latest.cluster && `${latest.cluster.strategy}, ${number(latest.cluster.replicas)} replica${latest.cluster.replicas === 1 ? "" : "s"}`,
    view.starts > 1 && `${view.starts} starts, the last after ${latest.start?.cause ?? "an end"}`,
    saved && `last checkpoint: step ${number(saved.step)}, ${number(saved.bytes / 2 ** 20, 3)} MiB in ${span(saved.seconds)}`,
    view.skipped > 0 && `${number(view.skipped)} line${view.skipped === 1 ? "" : "s"} of the record left out, which are not events`,
  ].filter(Boolean).join(" · ");
  $("progress").hidden = !(until > 0);
  if (until > 0) $("progress").value = Math.min(1, (step ?? 0) / until);
  document.title = `${step != null ? `${number(step)} – ` : ""}${run.name} – Crankshaft`;
}

function renderCurves(focus) {
  const single = runs.length === 1; // others that are not drawn in colour lie behind
  const all = shown().filter((run) => run.view.windows).sort((a, b) => chosen.drawn.has(a.index) - chosen.drawn.has(b.index));
  const byTime = chosen.axis === "time", elapsed = byTime && !single;
  const from = (run) => (elapsed ? run.view.first ?? run.view.windows.time?.[0] ?? 0 : 0);
  const marks = marksOf(focus.view, Object.values(MARKS), (note) => note[chosen.axis] - (byTime ? from(focus) : 0));
  const metrics = new Set(all.flatMap((run) => [...metricsIn(run.view.windows), ...metricsIn(run.view.evaluations)]));
  const other = all.flatMap((run) => Object.keys(run.view.windows)).filter((name) => /^(learning_rate\/|loss_scale|tables\/)/.test(name));
  const names = [...new Set([...metrics, ...Object.keys(RATES), ...other])].slice(0, MOST_CURVES);
  const kept = new Set();
  for (const name of names) {
    const curves = all.flatMap((run) => ["windows", "evaluations"].map((kind) => ({
      label: `${single ? "" : `${run.name} `}${kind === "windows" ? (single ? (name.startsWith("metrics.") ? "train" : "value") : "") : "evaluation"}`.trim(),
      colour: !chosen.drawn.has(run.index) ? "other" : `c${chosen.drawn.get(run.index) + (single && kind !== "windows" ? 1 : 0)}`,
      dash: kind === "windows" ? undefined : [6, 4], points: kind !== "windows" && chosen.drawn.has(run.index), index: run.index,
      data: points(run.view[kind][chosen.axis], run.view[kind][name] || [], from(run)),
    })));
    const key = `curve/${name}`;
    const host = charts.get(key)?.host ?? $("curve-charts").appendChild(make("div"));
    const log = chosen.scale === "log" && curves.every((each) => each.data[1].every((value) => value > 0));
    const filled = curves.filter((each) => each.data[0].length);
    const marked = filled.some((each) => each.index === focus.index) ? marks : []; // on the curve of their run
    const look = { log, title: RATES[name] ?? name.replace(/^metrics\./, "").replaceAll("_", " "), time: byTime && single, elapsed, marks: marked, keyed: filled.length > MOST_KEYS };
    if (!filled.length) { host.remove(); continue; }
    draw(host, key, uPlot.join(filled.map((each) => each.data)), filled, look); // which aligns curves of different x
    kept.add(key);
  }
  prune("curve/", kept);
  $("curves").hidden = !kept.size;
}

const marksOf = (view, colours, at) => (view.notes || []).filter((note) => colours.includes(MARKS[note.event])).map((note) => ({ kind: note.event, at: at(note) }));

function renderSpent(view) {
  const { windows = {}, latest = {} } = view, total = windows["spent.total"] || [];
  const kinds = Object.keys(SPENT).filter((kind) => windows[`spent.${kind}`]?.some((value) => value > 0));
  $("spent").hidden = !kinds.length;
  if (!kinds.length) return;
  const shares = kinds.map((kind) => windows[`spent.${kind}`].map((value, i) => {
    const whole = (total[i] ?? 0) - (total[i - 1] ?? 0);
    return whole > 0 ? Math.max(0, value - (windows[`spent.${kind}`][i - 1] ?? 0)) / whole : 0;
  }));
  let sum = total.map(() => 0);
  // Each area reaches from 0 to the sum of the shares so far, so the largest is drawn first.
  const areas = shares.map((own) => (sum = sum.map((value, i) => value + own[i]))).reverse();
  const series = kinds.map((kind) => ({ label: kind, colour: SPENT[kind], fill: true, steps: true })).reverse();
  const marks = marksOf(view, ["fault"], (note) => note.time);
  const times = [windows.time[0] - total[0], ...windows.time]; // from the run's first start
  const draws = times.every((value, i) => value != null && (i === 0 || value > times[i - 1]));
  if (draws) draw($("spent-chart"), "spent", [times, ...areas.map((area) => [area[0], ...area])], series, { title: "share of the time", time: true, marks, range: [0, 1], keyed: true });
  const sums = spentBy(view) ?? {};
  table($("spent-table"), ["", "time", "share"], kinds.map((kind) => {
    const cell = make("td"), key = make("i", "", "key");
    key.style.color = `var(--${SPENT[kind]})`;
    cell.append(key, kind);
    return [cell, span(sums[kind]), share(sums[kind], sums.total)];
  }), [false, true, true]);
}

// What is worse than planned by more than a plan's error is marked: 15 % of a rate, 10 % of memory.
function renderPlan(view) {
  const { plan = {}, windows = {} } = view, spent = spentBy(view);
  const percent = (value) => `${Math.round(100 * value)} %`, mebibytes = (value) => `${number(value)} MiB`;
  const rows = [
    ["examples a second", plan.examples_per_sec, last(windows.examples_per_sec), number, (planned, actual) => actual < 0.85 * planned],
    ["memory", plan.host_bytes / 2 ** 20, last(windows.memory_mb), mebibytes, (planned, actual) => actual > 1.1 * planned],
    ["steps wait for the network and other workers", plan.network_share, last(windows.reduce_fraction), percent, (planned, actual) => actual > planned + 0.15],
    ["goodput", plan.goodput, spent?.total > 0 ? spent.steps / spent.total : null, percent, (planned, actual) => actual < planned - 0.15],
  ].filter(([, planned, actual]) => Number.isFinite(planned) && Number.isFinite(actual));
  $("plan").hidden = !rows.length;
  table($("plan-table"), ["", "planned", "actual"], rows.map(([name, planned, actual, shown]) => [name, shown(planned), make("td", shown(actual), "figure state")]), [false, true, true],
    rows.map(([, planned, actual, , isWorse]) => (isWorse(planned, actual) ? "slow" : "")));
}

const health = ({ name, state, why }) => make("td", `${state === "runs" && runs[chosen.focus].killed ? "ended" : state}${why ? `: ${why.replace(`${name} `, "").replace(/^\([^)]*\) /, "")}` : ""}`, "state");

function renderWorkers(view) {
  const workers = (view.workers || []).filter((each) => each.name.toLowerCase().includes(chosen.find.toLowerCase()));
  $("workers").hidden = !view.workers?.length && !chosen.find;
  const figures = Object.keys(FIGURES).filter((figure) => workers.some((each) => figure in each.figures));
  options($("figure"), figures, FIGURES);
  const lanes = workers.slice(0, MOST_LANES), figure = chosen.figure;
  $("workers-count").textContent = workers.length > lanes.length ? `${lanes.length} of ${number(workers.length)}, those that are stopped and slow first; find others by their name` : "";
  const cell = (tag, name, text) => make(tag, text, name === figure ? "figure" : "figure other");
  table($("lanes-head"), ["worker", "state", ...figures.map((name) => cell("th", name, FIGURES[name])), `${FIGURES[figure] || ""} over time`], []);
  const values = lanes.flatMap((each) => each.lane?.[figure] || []).filter((value) => value != null).sort((a, b) => a - b);
  const most = Math.min(values.at(-1), 3 * values[values.length >> 1]) || values.at(-1) || 1; // a step that compiles would leave the others flat
  const times = view.lane_time || [], marks = marksOf(view, ["fault"], (note) => note.time);
  const look = { time: true, bare: true, height: 34, marks, range: [Math.min(0, values[0] ?? 0), 1.05 * most], span: [times[0], times.at(-1)] };
  prune("lane/", new Set(lanes.map((each) => `lane/${each.name}`)));
  const rows = lanes.map((each) => {
    const key = `lane/${each.name}`, row = make("tr", "", each.state), lane = charts.get(key)?.host ?? make("td", "", "lane");
    row.append(make("th", each.name), health(each));
    row.append(...figures.map((name) => cell("td", name, number(each.figures[name], 3))), lane);
    return { row, lane, key, data: points(times, (each.lane?.[figure] || []).map((value) => (value == null ? null : Math.min(value, most)))) };
  });
  $("lanes").replaceChildren(...rows.map(({ row }) => row));
  for (const { lane, key, data } of rows)
    if (data[0].length) draw(lane, key, data, [{ label: figure, colour: "c0" }], look);
}

function renderServers(view) {
  const servers = view.servers || [], staleness = view.latest?.window?.staleness || {};
  const counts = Object.entries(staleness).map(([lag, count]) => [Number(lag), count]).filter(([lag, count]) => lag >= 0 && count >= 0).sort((a, b) => a[0] - b[0]);
  $("servers").hidden = !servers.length && !counts.length;
  table($("servers-table"), ["server", "state", "s", "MiB", "rows of tables"], servers.map((each) => [each.name, health(each), number(each.seconds), number(each.bytes / 2 ** 20),
    Object.entries(each.rows ?? {}).map(([name, rows]) => `${name} ${number(rows)}`).join(", ")]), [false, false, true, true], servers.map((each) => each.state));
  if (counts.length) draw($("staleness-chart"), "staleness", [counts.map((each) => each[0]), counts.map((each) => each[1])],
    [{ label: "updates", colour: "c0", fill: true, bars: true }], { title: "updates by their staleness", x: "staleness" });
  else remove("staleness");
}

function renderBenchmark(focus) {
  const all = drawn().filter((run) => run.view.result?.sections);
  $("benchmark").hidden = !all.length;
  const rows = []; // {title, name, texts}, in the order of the report, of all results
  all.forEach((run, index) => {
    let before = -1;
    for (const { title, columns, rows: own } of run.view.result.sections)
      if (!columns.length) for (const [name, text] of own) {
        let at = rows.findIndex((row) => row.title === title && row.name === name);
        if (at < 0) rows.splice(at = before + 1, 0, { title, name, texts: Array(all.length).fill("–") });
        const { texts } = rows[before = at];
        texts[index] = texts[index] === "–" ? text : `${texts[index]}\n${text}`; // of warnings there may be several
      }
  });
  table($("benchmark-table"), ["", ...all.map((run) => run.name)],
    rows.flatMap(({ title, name, texts }, i) => [...(title === rows[i - 1]?.title ? [] : [[make("th", title)]]), [name, ...texts]]));
  const lists = (focus.view.result?.sections || []).filter((each) => each.columns.length);
  $("benchmark-lists").replaceChildren(...lists.flatMap(({ title, columns, rows, figures }) => {
    const made = make("table");
    table(made, columns, rows, figures);
    return [make("h3", `${title}${all.length > 1 ? ` of ${focus.name}` : ""}`), made];
  }));
}

function told(note) {
  const text = String(note.text ?? note.cause ?? note.reason ?? ""), task = note.task && !text.startsWith(note.task) ? `${note.task}: ` : "", code = note.exit_code ? ` (exit code ${note.exit_code})` : "";
  if (note.event === "start") return `start ${number(note.attempt)} on ${note.host ?? "?"}${note.cause ? `, after ${note.cause}` : ""}`;
  if (note.event === "checkpoint") return `${note.best ? "the best so far, " : ""}${number(note.bytes / 2 ** 20, 3)} MiB in ${span(note.seconds)}${note.earlier ? `, and ${number(note.earlier)} before` : ""}`;
  return `${task}${text}${code}`;
}
// A row for checkpoints between two other events.
function folded(notes) {
  return notes.reduce((rows, note) => {
    const before = rows.at(-1);
    if (note.event === "checkpoint" && before?.event === "checkpoint") before.earlier = (before.earlier ?? 0) + 1;
    else rows.push({ ...note });
    return rows;
  }, []);
}
function renderNotes({ view, killed }) {
  const notes = folded([...(view.notes || []), ...(killed ? [{ event: "fault", time: killed, text: "its process is gone, and has not said why: it was killed, or its machine stopped" }] : [])].reverse()).slice(0, 300);
  $("notes").hidden = !notes.length;
  table($("notes-table"), ["when", "step", "what", ""], notes.map((note) => [moment(note.time), number(note.step), make("td", note.event, MARKS[note.event] || ""), told(note)]), [false, true]);
}

// First what differs from the defaults.
function renderConfiguration(run) {
  const values = flagsOf(run), changed = new Set(run.view.changed), names = Object.keys(values).sort((a, b) => changed.has(b) - changed.has(a) || (a < b ? -1 : 1));
  const lines = names.map((name) => [name, flagText(values[name])]).filter(([name, text]) => changed.has(name) || !["null", "", "[]", "{}"].includes(text));
  $("configuration").hidden = !lines.length;
  table($("configuration-table"), [], lines, [], lines.map(([name]) => (changed.has(name) ? "changed" : "quiet")));
}

function renderLogs(view) {
  const logs = view.logs || {}, pre = $("log-text");
  $("logs").hidden = !Object.keys(logs).length;
  options($("log"), Object.keys(logs));
  const isAtEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4;
  if (pre.textContent !== (logs[chosen.log] ?? "")) pre.textContent = logs[chosen.log] ?? "";
  if (isAtEnd) pre.scrollTop = pre.scrollHeight;
}

// One value that a section can't show leaves the others as they are.
function attempt(section, ...given) {
  try { section(...given); } catch (error) { setTimeout(() => { throw error; }); }
}

function render() {
  renderRuns();
  const focus = { ...runs[chosen.focus], index: chosen.focus };
  if (!focus.view) return;
  for (const section of [renderSummary, renderCurves, renderBenchmark, renderNotes, renderConfiguration]) attempt(section, focus);
  for (const section of [renderPlan, renderSpent, renderWorkers, renderServers, renderLogs]) attempt(section, focus.view);
  renderState(focus);
}

// -- Data -------------------------------------------------------------------------------------------------------------

function take(answer) {
  const isNew = answer.some((run, index) => run.view || run.killed !== runs[index]?.killed || run.late !== runs[index]?.late);
  runs = answer.map((run, index) => ({ ...run, view: run.view ?? runs[index]?.view }));
  if (isNew) render();
  else renderState(runs[chosen.focus]);
}
async function poll() {
  const query = new URLSearchParams(location.search);
  query.set("seen", runs.map((run) => run.revision).join(","));
  query.set("find", chosen.find);
  let wait = 500;
  try {
    const answer = await fetch(`data?${query}`);
    if (!answer.ok) throw new Error(answer.statusText);
    lost = "";
    take((await answer.json()).runs);
    if (runs.some((run) => run.read < 1)) wait = 0;
  } catch (error) {
    lost = `crankshaft monitor does not answer (${error.message}); the page shows earlier data`;
    if (runs[chosen.focus]?.view) renderState(runs[chosen.focus]);
    else $("news").textContent = lost;
  }
  clearTimeout(timer); // another call may have set it
  timer = setTimeout(poll, wait);
}

for (const id of ["axis", "scale", "figure", "log"]) $(id).addEventListener("change", (event) => { chosen[id] = event.target.value; render(); });
$("find").addEventListener("input", (event) => {
  chosen.find = event.target.value;
  render();
  if (held) return;
  clearTimeout(timer);
  poll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  prune("curve/", new Set());
  for (const key of [...charts.keys()]) remove(key);
  render();
});
if (held) take(held.runs);
else poll();
