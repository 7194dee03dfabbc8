"use strict";
// Draws the figures of the page, which are in it once, as JSON. Every number that is shown carries its value in
// `data-value`; every picture has a table with the same figures.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const { totals, names, timeline } = figures;
  const place = (id) => document.getElementById(id);

  // Elements

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((each) => each !== null && each !== undefined));
    return element;
  }
  const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Numbers

  const UNITS = {
    seconds: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]],
    bytes: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "KB"], [1, "B"]],
    flops: [[1e18, "EFLOP"], [1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1, "FLOP"]],
  };
  const unitFor = (kind, value) => UNITS[kind].find(([size]) => value >= size) || UNITS[kind].at(-1);
  const digitsFor = (value) => (value >= 100 ? 0 : value >= 10 ? 1 : 2);

  function show(kind, value) {
    if (kind === "share") return `${(100 * value).toFixed(1)} %`;
    if (kind === "count") return value.toLocaleString("en");
    if (!value) return "0";
    const [size, name] = unitFor(kind, value);
    return `${(value / size).toFixed(size === 1 && kind !== "seconds" ? 0 : digitsFor(value / size))} ${name}`;
  }

  // A number beside others that differ by `step`: all in the unit that suits `most`, with the digits that tell them apart.
  function showStep(kind, value, step, most) {
    const [size, name] = unitFor(kind, most);
    const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / size) - 1e-9)));
    return Math.abs(value) < step * 1e-6 ? "0" : `${(value / size).toFixed(digits)} ${name}`;
  }

  // Tables: a column is {title, kind, of}; all times, sizes or counts of a table have one unit and one number of digits.

  function table(caption, columns, rows, classOf) {
    const most = (kind) => Math.max(...columns.filter((each) => each.kind === kind).flatMap((each) => rows.map((row) => each.of(row) || 0)), 0);
    const shown = columns.map((column) => scale(column, UNITS[column.kind] ? most(column.kind) : 0));
    const head = shown.map((column) => make("th", { scope: "col", class: column.kind === "text" ? null : "number" }, column.title));
    const lines = rows.map((row) =>
      make("tr", { class: classOf ? classOf(row) : null }, shown.map((column, i) => cell(column, row, i === 0))));
    const whole = make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, head)), make("tbody", {}, lines));
    return make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": caption }, whole);
  }

  function scale(column, most) {
    if (!UNITS[column.kind]) return { write: (value) => (column.kind === "text" ? value : show(column.kind, value)), ...column };
    const [size, name] = unitFor(column.kind, column.kind === "seconds" ? most / 10 : most); // ten times finer: small parts matter
    const digits = size === 1 && column.kind !== "seconds" ? 0 : most / size >= 100 ? 1 : 2;
    const write = (value) => (value ? (value / size).toFixed(digits) : "0");
    return { ...column, title: `${column.title}, ${name}`, write, size };
  }

  function cell(column, row, isFirst) {
    const value = column.of(row);
    const number = column.kind !== "text" && value !== null && value !== undefined;
    const attributes = { class: column.kind === "text" ? null : "number", scope: isFirst ? "row" : null };
    if (number) Object.assign(attributes, { "data-value": value, "data-of": column.id || column.title, "data-unit": column.size });
    return make(isFirst ? "th" : "td", attributes, number || column.kind === "text" ? column.write(value) : "");
  }

  const text = (title, of) => ({ title, kind: "text", of });
  const counted = (row) => (row.count > 1 ? `${row.name} ×${row.count}` : row.name);
  const code = (what) => make("code", {}, what);
  const TIMES = [
    { title: "Time", id: "time", kind: "seconds", of: (row) => row.time },
    { title: "Share", id: "share", kind: "share", of: (row) => (totals.time ? row.time / totals.time : 0) },
    { title: "Compute", id: "compute", kind: "seconds", of: (row) => row.compute },
    { title: "Exposed", id: "exposed", kind: "seconds", of: (row) => row.exposed },
    { title: "Hidden", id: "hidden", kind: "seconds", of: (row) => row.hidden },
  ];
  const CALLS = { title: "Calls", id: "calls", kind: "count", of: (row) => row.calls };
  const FLOPS = { title: "Arithmetic", id: "flops", kind: "flops", of: (row) => row.flops };
  const BYTES = { title: "Received", id: "bytes", kind: "bytes", of: (row) => row.bytes };

  const more = (title, ...children) => make("details", {}, make("summary", {}, title), ...children);
  const legend = (items) => make("ul", { class: "legend" }, items.map(([colour, what]) =>
    make("li", {}, make("i", { style: `background:${colour}`, "aria-hidden": "true" }), what)));

  // Headline

  function headline() {
    place("title").textContent = figures.title;
    const how = totals.has_data ? "with data" : "without data";
    place("subtitle").textContent =
      `${show("count", totals.calls)} calls, recorded ${how}. What one device does and holds stands for all devices of its kind.`;
    const bound = figures.bounds[0], whole = figures.bounds.reduce((sum, each) => sum + each.seconds, 0) || 1;
    const colours = figures.bounds.map((each) => boundColour(each.what));
    const tiles = make("dl", { class: "tiles" },
      tile("Step time", "time", totals.time, show("seconds", totals.time),
        `compute ${show("seconds", totals.compute)}, waits ${show("seconds", totals.exposed)}`),
      tile("Model FLOPs utilisation", "mfu", totals.mfu, show("share", totals.mfu),
        `${show("flops", totals.flops)} in all; peak ${show("flops", totals.peak_flops)}/s per device (${totals.dtype})`),
      tile("Peak memory of one device", "memory", totals.memory, show("bytes", totals.memory), limitText(), limitBar()),
      tile("Bound by", "bound", bound ? bound.seconds : 0, bound ? bound.what : "nothing",
        bound ? `${show("share", bound.seconds / whole)} of the time` : "the step has no calls that cost time"));
    const bar = make("div", { class: "bar", "aria-hidden": "true" }, figures.bounds.map((each, i) =>
      make("span", { style: `width:${(100 * each.seconds) / whole}%;background:${colours[i]}` })));
    const key = legend(figures.bounds.map((each, i) =>
      [colours[i], make("span", { "data-of": `bound ${each.what}`, "data-value": each.seconds },
        `${each.what} ${show("seconds", each.seconds)} (${show("share", each.seconds / whole)})`)]));
    place("headline").append(tiles, make("div", { class: "tile" }, make("span", { class: "note" }, "What the time goes to"), bar, key));
  }

  const waits = [...new Set([figures, ...(figures.plans || [])].flatMap((run) => run.bounds.map((each) => each.what)))].filter((what) => what.startsWith("waits"));
  const boundColour = (what) => what === "arithmetic" ? "var(--phase-0)" : what === "memory traffic" ? "var(--phase-2)"
    : `color-mix(in srgb, var(--wait) ${100 - 30 * (waits.indexOf(what) % 3)}%, var(--card))`;

  const tile = (title, id, value, big, ...rest) => make("div", { class: "tile" }, make("dt", {}, title),
    make("dd", {}, make("div", { class: id === "bound" ? "big words" : "big", "data-of": `total ${id}`, "data-value": value }, big),
      rest.map((each) => make("div", { class: "more" }, each))));

  function limitText() {
    if (totals.limit === null) return "no limit was given";
    const share = totals.memory / totals.limit, said = `${show("share", share)} of ${show("bytes", totals.limit)}`;
    return share > 1 ? make("span", { class: "over" }, `${said}: does not fit`) : said;
  }

  function limitBar() {
    if (totals.limit === null) return null;
    const share = totals.memory / totals.limit;
    return make("div", { class: "bar", "aria-hidden": "true" },
      make("span", { style: `width:${Math.min(100 * share, 100)}%;background:var(${share > 1 ? "--wait" : "--accent"})` }));
  }

  // Plans side by side, where there are several

  function plans() {
    if (!figures.plans) return;
    place("time").before(make("section", { id: "plans", "aria-labelledby": "plans-h" }, make("h2", { id: "plans-h" }, "Plans side by side"),
      make("p", { class: "note" }, "The figures of this page are those of the first plan. The bars have one scale; a shorter bar is a faster step."),
      legend(boundsOfPlans().map((what) => [boundColour(what), what])), figures.plans.map(planBar), planTable(), figures.plans.map(planLines)));
    document.querySelector("nav a[href='#time']").before(make("a", { href: "#plans" }, "Plans"), " ");
  }

  const boundsOfPlans = () => [...new Set(figures.plans.flatMap((plan) => plan.bounds.map((each) => each.what)))];

  function planBar(plan, i) {
    const slowest = Math.max(...figures.plans.map((each) => each.time)) || 1;
    return make("div", { class: "plan" }, make("div", {}, make("b", {}, `${i + 1}. ${show("seconds", plan.time)}`), ` ${plan.title} on `, code(plan.mesh)),
      make("div", { class: "bar", "aria-hidden": "true" }, plan.bounds.map((each) =>
        make("span", { style: `width:${(100 * each.seconds) / slowest}%;background:${boundColour(each.what)}` }))));
  }

  const planTable = () => table("Plans, the fastest first", [
    text("Plan", (row) => row.title), text("Mesh", (row) => code(row.mesh)),
    { title: "Time", id: "time", kind: "seconds", of: (row) => row.time },
    { title: "Compute", id: "compute", kind: "seconds", of: (row) => row.compute },
    { title: "Exposed", id: "exposed", kind: "seconds", of: (row) => row.exposed },
    { title: "Memory", id: "memory", kind: "bytes", of: (row) => row.memory },
    BYTES, { title: "MFU", id: "mfu", kind: "share", of: (row) => row.mfu },
    text("Beside the first", (row) => row.why),
  ], figures.plans);

  const planLines = (plan, i) => more(`Lines of plan ${i + 1}: ${plan.title}`, make("pre", {}, plan.plan));

  // Time by phase and kind

  function timeTable() {
    const rows = figures.phases.flatMap((phase) => [
      { ...phase, whole: true }, ...figures.kinds.filter((each) => each.phase === phase.name)]);
    place("time").append(
      make("p", { class: "note" }, "Exposed communication is what the device waits for; hidden communication runs beside compute and adds nothing. Time is compute and exposed communication."),
      table("Time of one device by phase, and in each phase by what it goes to", [text("Phase and kind", (row) => row.name), CALLS, ...TIMES, BYTES],
        rows, (row) => (row.whole ? "group" : "part")),
      more("By op", table("Time of one device by op", [text("Op", (row) => code(row.name)), CALLS, ...TIMES, FLOPS, BYTES], figures.ops)));
  }

  // Memory

  const running = (changes) => { let sum = 0; return changes.map((each) => (sum += each)); };
  const at = running(figures.memory.nodes), held = figures.memory.held.map(running);
  const heldColour = (i) => `var(--held-${i})`;

  function memoryParts() {
    const memory = figures.memory;
    const points = at.map((node, i) => ({ node, time: memory.times[i], held: held.map((column) => column[i]) }));
    points.forEach((point) => { point.bytes = point.held.reduce((sum, each) => sum + each, 0); });
    const used = memory.purposes.map((what, i) => i).filter((i) => memory.peaks[i]);
    const most = points.reduce((best, each) => (best && best.bytes >= each.bytes ? best : each), null);
    const section = place("memory");
    section.append(make("p", {}, "The peak of ", make("b", {}, show("bytes", totals.memory)), " is reached during ", code(memory.call), "."));
    if (points.length) section.append(legend(used.map((i) => [heldColour(i), memory.purposes[i]])), ...memoryPicture(points, used, most));
    section.append(
      table("What the memory is held for", [
        text("Held for", (row) => row.what),
        { title: "At the peak", id: "at_peak", kind: "bytes", of: (row) => row.now },
        { title: "Share", id: "share", kind: "share", of: (row) => (totals.memory ? row.now / totals.memory : 0) },
        { title: "Most at any time", id: "peaks", kind: "bytes", of: (row) => row.most },
      ], used.map((i) => ({ what: memory.purposes[i], now: memory.at_peak[i], most: memory.peaks[i] }))),
      table(`The largest of ${show("count", memory.tensors)} tensors alive at the peak, equal ones together`, [
        text("Tensor", (row) => code(counted(row))), text("Held for", (row) => row.purpose),
        text("Line", (row) => code(row.where || "before the step")),
        { title: "Size", id: "alive", kind: "bytes", of: (row) => row.bytes },
      ], memory.alive));
    if (points.length) section.append(more("Memory over time as a table", memoryTable(points, used)));
  }

  // Of many points, those that a picture of some width can show: in each part of the time the one that holds most.
  function thin(points, parts) {
    const end = totals.time || 1, found = new Map();
    for (const point of points) {
      const part = Math.min(Math.floor((point.time / end) * parts), parts - 1), best = found.get(part);
      if (!best || best.bytes < point.bytes) found.set(part, point);
    }
    return [...found.values()];
  }

  function memoryPicture(points, used, most) {
    const [width, height, left, top, bottom] = [1100, 260, 64, 18, 40];
    const shown = thin(points, 500), highest = Math.max(most.bytes * 1.12, 1);
    const limit = totals.limit !== null && totals.limit <= highest * 1.6 ? totals.limit : null;
    const scaleY = limit === null ? highest : Math.max(highest, limit * 1.06);
    const x = (time) => left + ((width - left - 8) * time) / (totals.time || 1);
    const y = (bytes) => top + (height - top - bottom) * (1 - bytes / scaleY);
    const parts = [];
    const levels = ticks(scaleY, 6), times = ticks(totals.time, 6);
    for (const bytes of levels) parts.push(draw("line", { x1: left, x2: width - 8, y1: y(bytes), y2: y(bytes), stroke: "var(--line)" }),
      draw("text", { x: left - 8, y: y(bytes) + 4, "text-anchor": "end", class: "quiet" }, showStep("bytes", bytes, levels[1] || 1, scaleY)));
    let below = shown.map(() => 0);
    for (const i of used) {
      const above = shown.map((point, k) => below[k] + point.held[i]);
      parts.push(draw("path", { d: area(shown, below, above, x, y), fill: heldColour(i) }, draw("title", {}, figures.memory.purposes[i])));
      below = above;
    }
    for (const [phase, from, to] of phaseSpans(points)) parts.push(...phaseBand(phase, x(from), x(to), height - bottom + 6));
    for (const seconds of times) parts.push(draw("text", { x: x(seconds), y: height - 2, "text-anchor": "middle", class: "quiet" }, showStep("seconds", seconds, times[1] || 1, totals.time)));
    if (limit !== null) parts.push(draw("line", { x1: left, x2: width - 8, y1: y(limit), y2: y(limit), stroke: "var(--wait)", "stroke-dasharray": "6 4" }),
      draw("text", { x: width - 10, y: y(limit) - 5, "text-anchor": "end", class: "halo" }, `limit ${show("bytes", limit)}`));
    const side = x(most.time) > width * 0.7 ? ["end", -8] : ["start", 8];
    parts.push(draw("line", { x1: x(most.time), x2: x(most.time), y1: y(most.bytes), y2: height - bottom, stroke: "var(--ink)", "stroke-dasharray": "3 3" }),
      draw("circle", { cx: x(most.time), cy: y(most.bytes), r: 4, fill: "var(--ink)" }),
      draw("text", { x: x(most.time) + side[1], y: y(most.bytes) - 5, "text-anchor": side[0], "font-weight": 600, class: "halo" }, `peak ${show("bytes", most.bytes)}`));
    const cursor = draw("line", { y1: top, y2: height - bottom, stroke: "var(--focus)", visibility: "hidden" });
    const readout = make("p", { class: "readout", "aria-live": "polite", id: "memory-readout" }, "Point at the picture, or focus it and use the arrow keys, to read it.");
    let chosen = -1;
    const choose = (k) => {
      chosen = Math.max(0, Math.min(shown.length - 1, k));
      const point = shown[chosen];
      fill(cursor, { x1: x(point.time), x2: x(point.time), visibility: "visible" }, []);
      readout.replaceChildren(make("b", {}, `${show("bytes", point.bytes)} at ${show("seconds", point.time)}`), ` during ${describe(point.node)}: `,
        used.filter((i) => point.held[i]).map((i) => `${figures.memory.purposes[i]} ${show("bytes", point.held[i])}`).join(", "));
    };
    const nearest = (time) => shown.reduce((best, point, k) => (Math.abs(point.time - time) < Math.abs(shown[best].time - time) ? k : best), 0);
    const keys = { ArrowRight: () => chosen + 1, ArrowLeft: () => chosen - 1, Home: () => 0, End: () => shown.length - 1 };
    const picture = draw("svg", { id: "memory-picture", class: "picture", viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0",
      "aria-label": `Memory of one device over the step, with a peak of ${show("bytes", most.bytes)} at ${show("seconds", most.time)}. Arrow keys read it point by point.`,
      onmousemove: (event) => { const box = picture.getBoundingClientRect(); choose(nearest((((event.clientX - box.left) * width / box.width - left) / (width - left - 8)) * totals.time)); },
      onkeydown: (event) => { if (keys[event.key]) { event.preventDefault(); choose(keys[event.key]()); } } }, parts, cursor);
    return [picture, readout];
  }

  function area(points, below, above, x, y) {
    const end = (k) => x(k + 1 < points.length ? points[k + 1].time : totals.time);
    const over = points.map((point, k) => `${x(point.time).toFixed(1)} ${y(above[k]).toFixed(1)} ${end(k).toFixed(1)} ${y(above[k]).toFixed(1)}`);
    const under = points.map((point, k) => `${end(k).toFixed(1)} ${y(below[k]).toFixed(1)} ${x(point.time).toFixed(1)} ${y(below[k]).toFixed(1)}`);
    return `M${over.join(" L")} L${under.reverse().join(" L")}Z`;
  }

  function phaseSpans(points) {
    const spans = [];
    for (const point of points) {
      const phase = figures.nodes.phase[point.node], last = spans.at(-1);
      if (last && last[0] === phase) last[2] = point.time;
      else spans.push([phase, point.time, point.time]);
    }
    spans.forEach((span, k) => { span[2] = k + 1 < spans.length ? spans[k + 1][1] : totals.time; });
    return spans.filter(([, from, to]) => to > from);
  }

  function phaseBand(phase, from, to, y) {
    const name = timeline.phases[phase];
    const label = to - from > 8 * name.length ? [draw("text", { x: (from + to) / 2, y: y + 11, "text-anchor": "middle", style: "fill:var(--on-fill);font-size:11px" }, name)] : [];
    return [draw("rect", { x: from, y, width: Math.max(to - from - 1, 0.5), height: 14, fill: `var(--phase-${phase})`, rx: 2 }, draw("title", {}, name)), ...label];
  }

  const memoryTable = (points, used) => table("Memory in 24 parts of the step: in each the moment that holds most", [
    text("During", (row) => code(describe(row.node))), { title: "At", kind: "seconds", of: (row) => row.time },
    { title: "All", kind: "bytes", of: (row) => row.bytes },
    ...used.map((i) => ({ title: figures.memory.purposes[i], kind: "bytes", of: (row) => row.held[i] }))], thin(points, 24));

  // Round numbers between zero and a number.
  function ticks(most, about) {
    if (!(most > 0)) return [0];
    const rough = most / about, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, k) => k * step);
  }

  function describe(node) {
    const { op, phase, module, where } = figures.nodes;
    const path = names[module[node]];
    return `${names[op[node]]} (${timeline.phases[phase[node]]}) at ${path ? `${path}, ` : ""}${names[where[node]]}`;
  }

  // Modules: a flame graph from the top down

  const ROW = 26;
  let trail = [figures.tree]; // from the root to the branch that fills the width

  function modules() {
    place("modules").append(
      make("p", { class: "note" }, "Width is time. Equal layers are one box with their number. Click a box, or press Enter on it, to zoom; arrow keys move, Escape zooms out."),
      make("div", { class: "tools", id: "trail", role: "group", "aria-label": "Where the flame graph is zoomed to" }),
      make("div", { id: "flame", role: "tree", "aria-label": "Flame graph of the modules by time", onkeydown: flameKey }),
      legend([["var(--module)", "module"], ...timeline.phases.map((name, i) => [`var(--phase-${i})`, `op in ${name}`]).filter((each, i) =>
        figures.phases.some((phase) => phase.name === timeline.phases[i])), ["var(--wait)", "waits for links"]]),
      make("p", { class: "readout", "aria-live": "polite", id: "flame-readout" }),
      more("Modules as a table", table("Time of one device by module, equal layers together", [
        text("Module", (row) => code(counted(row))), CALLS, ...TIMES, FLOPS, BYTES], figures.modules)));
    flame();
  }

  function flame(focus) {
    const top = trail.at(-1), boxes = [];
    const lay = (branch, left, depth, path) => {
      const width = top.time ? branch.time / top.time : 0;
      if (depth && width < 0.0012) return;
      boxes.push(flameBox(branch, left, width, depth, path));
      let x = left;
      for (const inner of branch.inside) { lay(inner, x, depth + 1, [...path, inner]); x += top.time ? inner.time / top.time : 0; }
    };
    lay(top, 0, 0, trail);
    const area = place("flame");
    area.style.height = `${ROW * (1 + Math.max(...boxes.map((each) => each.depth)))}px`;
    area.replaceChildren(...boxes.map((each) => each.button));
    area.dataset.zoom = trail.map((each) => each.name).join(" / ");
    flameBoxes = boxes;
    place("trail").replaceChildren(...trail.map((branch, k) => make("button", { type: "button", disabled: k === trail.length - 1,
      onclick: () => zoomTo(trail.slice(0, k + 1)) }, counted(branch))));
    boxes[0].button.tabIndex = 0;
    if (focus) boxes[0].button.focus();
    readFlame(boxes[0]);
  }

  let flameBoxes = [];

  function flameBox(branch, left, width, depth, path) {
    const said = `${counted(branch)} · ${show("seconds", branch.time)} · ${show("share", totals.time ? branch.time / totals.time : 0)}`;
    const colour = branch.kind === "module" ? null : branch.kind === "waits" ? "var(--wait)" : `var(--phase-${timeline.phases.indexOf(branch.phase)})`;
    const box = { branch, depth, path, left, width };
    box.button = make("button", { type: "button", role: "treeitem", tabindex: "-1", "aria-level": depth + 1, "aria-label": said, title: said,
      class: `${branch.kind}${width < 0.02 ? " narrow" : ""}`, "data-path": branch.path, "data-kind": branch.kind, "data-value": branch.time, "data-of": "flame",
      style: `left:${100 * left}%;top:${ROW * depth}px;width:${100 * width}%;${colour ? `background:${colour}` : ""}`,
      onclick: () => zoomTo(path), onfocus: () => readFlame(box), onmouseenter: () => readFlame(box) }, width < 0.02 ? "" : said);
    return box;
  }

  function readFlame({ branch, path }) {
    const said = path.map(counted).join(" / ");
    const facts = [`${show("seconds", branch.time)} (${show("share", totals.time ? branch.time / totals.time : 0)})`, `compute ${show("seconds", branch.compute)}`,
      `exposed ${show("seconds", branch.exposed)}`, `hidden ${show("seconds", branch.hidden)}`, show("flops", branch.flops), `${show("bytes", branch.bytes)} received`,
      `${show("count", branch.calls)} calls`];
    place("flame-readout").replaceChildren(make("b", {}, said), make("br"), branch.kind === "waits" ? facts[0] : facts.join(", "));
  }

  function zoomTo(path) {
    trail = path.at(-1).kind === "waits" ? path.slice(0, -1) : path;
    flame(true);
  }

  function flameKey(event) {
    const now = flameBoxes.find((each) => each.button === document.activeElement);
    if (!now) return;
    const level = (depth) => flameBoxes.filter((each) => each.depth === depth);
    const beside = (by) => { const row = level(now.depth); return row[row.indexOf(now) + by]; };
    const inside = (outer, inner) => inner.left >= outer.left - 1e-9 && inner.left < outer.left + outer.width - 1e-9;
    const keys = {
      ArrowRight: () => beside(1), ArrowLeft: () => beside(-1), Home: () => flameBoxes[0],
      ArrowDown: () => level(now.depth + 1).find((each) => inside(now, each)), ArrowUp: () => level(now.depth - 1).find((each) => inside(each, now)),
    };
    if (event.key === "Escape" && trail.length > 1) zoomTo(trail.slice(0, -1));
    else if (keys[event.key]) move(now, keys[event.key]());
    else return;
    event.preventDefault();
  }

  function move(from, to) {
    if (!to) return;
    from.button.tabIndex = -1;
    to.button.tabIndex = 0;
    to.button.focus();
  }

  // Links

  const loadColour = (used) => `var(--load-${used < 0.02 ? 0 : used < 0.25 ? 1 : used < 0.6 ? 2 : 3})`;

  function links() {
    const section = place("links");
    section.append(make("p", { class: "note" }, "The devices of the mesh. The links of an axis have the colour of the part of the step in which they are busy."));
    section.append(legend([["var(--load-0)", "below 2 % busy"], ["var(--load-1)", "2 to 25 %"], ["var(--load-2)", "25 to 60 %"], ["var(--load-3)", "above 60 %"]]));
    figures.meshes.forEach((mesh, number) => section.append(meshPicture(mesh, number)));
    section.append(table("What the links of each mesh axis carry", [
      text("Axis", (row) => row.name), text("Links", (row) => row.links), { title: "Devices", id: "devices", kind: "count", of: (row) => row.devices },
      { title: "Collectives", id: "collectives", kind: "count", of: (row) => row.collectives }, { ...BYTES },
      { title: "Busy", id: "seconds", kind: "seconds", of: (row) => row.seconds }, { title: "Busy share", id: "used", kind: "share", of: (row) => row.used },
      { title: "Exposed", id: "exposed", kind: "seconds", of: (row) => row.exposed },
      text("Received by kind", (row) => Object.entries(row.kinds).map(([kind, bytes]) => `${kind} ${show("bytes", bytes)}`).join(", ")),
    ], figures.links));
  }

  const loadOf = (axis, mesh) => figures.links.find((each) => each.name === (mesh ? `${axis} of mesh ${mesh}` : axis));
  const drawn = (size, most) => (size <= most ? [...Array(size).keys()] : [...Array(most - 2).keys(), null, size - 1]);

  // The last two axes as a grid; each axis before them as a row of such grids.
  function meshPicture({ axes, shape, ids }, number) {
    const [gapX, gapY, wide, high, left] = [86, 66, 48, 32, 60], parts = [];
    let top = 34;
    const across = axes.at(-1), columns = drawn(shape.at(-1) || 1, 12), down = axes.at(-2), rows = drawn(shape.at(-2) || 1, 6);
    const sizeOf = (axis) => shape[axes.indexOf(axis)];
    const behind = (axis) => shape.slice(axes.indexOf(axis) + 1).reduce((product, each) => product * each, 1);
    const busy = (axis) => { const load = loadOf(axis, number); return load ? `${show("share", load.used)} busy` : "nothing moves"; };
    const label = (axis, x, y, anchor) => draw("text", { x, y, "text-anchor": anchor }, `${axis} = ${sizeOf(axis)}: ${busy(axis)}`);
    const link = (axis, x1, y1, x2, y2) => { const load = loadOf(axis, number); return draw("line", { x1, y1, x2, y2, "stroke-width": 5, class: "link",
      "data-axis": axis, stroke: loadColour(load ? load.used : 0) }, draw("title", {}, `links of ${axis}: ${busy(axis)}`)); };
    const written = (x, y, said) => draw("text", { x: x + wide / 2, y: y + high / 2 + 4, "text-anchor": "middle" }, said);
    const device = (x, y, said) => said === null ? [written(x, y, "…")]
      : [draw("rect", { x, y, width: wide, height: high, rx: 5, fill: "var(--faint)", stroke: "var(--soft)", class: "device" }), written(x, y, String(said))];
    if (across) parts.push(label(across, left, top - 14, "start"));
    if (down) parts.push(draw("g", { transform: `translate(24 ${top + ((rows.length - 1) * gapY + high) / 2}) rotate(-90)` }, label(down, 0, 0, "middle")));
    rows.forEach((row, j) => columns.forEach((column, i) => {
      const x = left + i * gapX, y = top + j * gapY, index = row === null || column === null ? null : row * (shape.at(-1) || 1) + column;
      if (i + 1 < columns.length && row !== null) parts.push(link(across, x + wide, y + high / 2, x + gapX, y + high / 2));
      if (j + 1 < rows.length && column !== null) parts.push(link(down, x + wide / 2, y + high, x + wide / 2, y + gapY));
      parts.push(...device(x, y, index === null || !ids ? index : ids[index]));
    }));
    top += Math.max((rows.length - 1) * gapY + high, down ? 110 : 0) + 44;
    for (const axis of axes.slice(0, -2).reverse()) {
      const places = drawn(sizeOf(axis), 10);
      parts.push(label(axis, left, top - 10, "start"));
      places.forEach((each, i) => {
        const x = left + i * gapX;
        if (i + 1 < places.length) parts.push(link(axis, x + wide, top + high / 2, x + gapX, top + high / 2));
        parts.push(...device(x, top, each));
      });
      parts.push(draw("text", { x: left + places.length * gapX - 24, y: top + high / 2 + 4, class: "quiet" }, `each a group of ${show("count", behind(axis))} devices`));
      top += high + 44;
    }
    const loads = axes.map((axis) => `${axis} of ${sizeOf(axis)}: ${busy(axis)}`);
    return draw("svg", { class: "picture mesh", viewBox: `0 0 1100 ${top - 30}`, role: "img", "aria-label": `Mesh. ${loads.join("; ")}` }, parts);
  }

  // Timeline

  const view = { from: 0, to: totals.time, chosen: -1, kind: 0 };
  const LANE = 34, LEFT = 90;

  function timelineParts() {
    const section = place("timeline");
    const act = (title, does) => make("button", { type: "button", onclick: () => { does(); paint(); } }, title);
    const kinds = timeline.classes.length > 1 ? timeline.classes.map((each, k) => act(`kind ${k}: ${each.devices} devices`, () => { view.kind = k; view.chosen = -1; press(); })) : [];
    const press = () => kinds.forEach((button, k) => button.setAttribute("aria-pressed", String(k === view.kind)));
    press();
    section.append(
      make("p", { class: "note" }, "Compute, and the collectives on the links of each axis. Drag to move. Focus the picture and turn the wheel, or hold Ctrl with it, to zoom; keys: + and − zoom, arrows move, n and p go from box to box, 0 shows all."),
      make("div", { class: "tools", role: "group", "aria-label": "View of the timeline" }, act("Zoom in", () => zoom(0.5)), act("Zoom out", () => zoom(2)), act("Earlier", () => pan(-0.25)), act("Later", () => pan(0.25)),
        act("Whole step", () => zoom(Infinity)), kinds),
      make("canvas", { id: "canvas", tabindex: "0", role: "img", onwheel: wheel, onkeydown: timelineKey, onpointerdown: drag }),
      legend([...timeline.phases.map((name, i) => [`var(--phase-${i})`, name]).filter((each, i) => figures.phases.some((phase) => phase.name === timeline.phases[i])),
        ["var(--wait)", "collective, mostly exposed"], ["var(--hidden)", "collective, mostly hidden"]]),
      make("p", { class: "readout", "aria-live": "polite", id: "timeline-readout" }, "Click a box to read it."),
      make("details", { id: "slices", ontoggle: sliceTable }, make("summary", {}, "What is in view as a table"), make("div", { id: "slice-table" })));
    paint();
  }

  const inView = () => {
    const lanes = timeline.classes[view.kind] ? timeline.classes[view.kind].lanes : [], found = [];
    for (let i = 0; i < timeline.start.length && timeline.start[i] <= view.to; i++)
      if (timeline.start[i] + timeline.duration[i] >= view.from && lanes.includes(timeline.lane[i])) found.push(i);
    return { lanes, found };
  };

  function paint() {
    const canvas = place("canvas"), { lanes, found } = inView(), ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = LANE * Math.max(lanes.length, 1) + 26;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    const x = (time) => LEFT + ((width - LEFT) * (time - view.from)) / ((view.to - view.from) || 1);
    lanes.forEach((lane, row) => {
      pen.fillStyle = style(row % 2 ? "--card" : "--faint");
      pen.fillRect(0, row * LANE, width, LANE);
    });
    const reached = lanes.map(() => -1), colours = timeline.phases.map((_, i) => style(`--phase-${i}`));
    const [wait, hidden, ink, onFill] = ["--wait", "--hidden", "--ink", "--on-fill"].map(style);
    if (found.length < 120) arrows(pen, found, lanes, x);
    for (const i of found) {
      const row = lanes.indexOf(timeline.lane[i]), from = Math.max(x(timeline.start[i]), LEFT), to = Math.min(x(timeline.start[i] + timeline.duration[i]), width);
      if (to < reached[row] + 0.5 && i !== view.chosen) continue;
      const moves = timeline.lanes[timeline.lane[i]].name !== "compute";
      pen.fillStyle = !moves ? colours[figures.nodes.phase[timeline.node[i]]] : timeline.exposed[i] * 2 > timeline.duration[i] ? wait : hidden;
      const sharp = Math.round(from); // whole pixels, so that thin boxes keep their colour
      pen.fillRect(sharp, row * LANE + 5, Math.max(Math.round(to) - sharp - (to - from > 3 ? 1 : 0), 1), LANE - 10);
      reached[row] = to;
      if (to - from > 46) boxText(pen, names[timeline.name[i]], from + 4, row * LANE + LANE / 2 + 4, to - from - 8, onFill);
      if (i === view.chosen) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.strokeRect(from, row * LANE + 4, Math.max(to - from, 2), LANE - 8); }
    }
    pen.fillStyle = style("--card");
    pen.fillRect(0, 0, LEFT - 2, height);
    pen.fillRect(0, lanes.length * LANE, width, 26);
    lanes.forEach((lane, row) => { const { mesh, name } = timeline.lanes[lane]; boxText(pen, mesh ? `${name} (${mesh})` : name, 8, row * LANE + LANE / 2 + 4, LEFT - 14, ink); });
    paintTicks(pen, x, width, lanes.length * LANE);
    canvas.dataset.from = view.from;
    canvas.dataset.to = view.to;
    canvas.dataset.boxes = found.length;
    canvas.setAttribute("aria-label", `Timeline of one device from ${show("seconds", view.from)} to ${show("seconds", view.to)}: ${found.length} boxes. The table below has them.`);
    if (place("slices").open) sliceTable();
  }

  function boxText(pen, said, x, y, width, colour) {
    let words = said;
    while (words.length > 1 && pen.measureText(words).width > width) words = `${words.slice(0, -2)}…`;
    pen.fillStyle = colour;
    if (words.length > 1) pen.fillText(words, x, y);
  }

  function paintTicks(pen, x, width, y) {
    const step = ticks(view.to - view.from, 6)[1] || 1;
    pen.fillStyle = style("--soft");
    for (let time = Math.ceil(view.from / step) * step; time <= view.to + step * 1e-9; time += step) {
      const said = showStep("seconds", time, step, view.to), at = x(time), half = pen.measureText(said).width / 2;
      pen.fillRect(at, y, 1, 5);
      pen.fillText(said, Math.min(Math.max(at - half, LEFT - 10), width - 2 * half - 2), y + 19);
    }
  }

  // From the compute of a node to its collectives, or from these to it.
  function arrows(pen, found, lanes, x) {
    const computes = new Map(found.filter((i) => timeline.lanes[timeline.lane[i]].name === "compute").map((i) => [timeline.node[i], i]));
    pen.strokeStyle = style("--soft");
    pen.lineWidth = 1;
    for (const i of found) {
      const other = computes.get(timeline.node[i]);
      if (other === undefined || other === i) continue;
      const [first, second] = timeline.start[i] < timeline.start[other] ? [i, other] : [other, i];
      const middle = (k) => lanes.indexOf(timeline.lane[k]) * LANE + LANE / 2;
      pen.beginPath();
      pen.moveTo(x(timeline.start[first] + timeline.duration[first]), middle(first));
      pen.lineTo(x(timeline.start[second]), middle(second));
      pen.stroke();
    }
  }

  function zoom(factor, around) {
    const centre = around === undefined ? (view.chosen >= 0 ? timeline.start[view.chosen] : (view.from + view.to) / 2) : around;
    const width = Math.min((view.to - view.from) * factor, totals.time);
    const share = around === undefined ? 0.5 : (centre - view.from) / ((view.to - view.from) || 1);
    look(centre - width * share, width);
  }
  const pan = (by) => look(view.from + by * (view.to - view.from), view.to - view.from);
  function look(from, asked) {
    const width = Math.max(Math.min(asked, totals.time), totals.time * 1e-7);
    view.from = Math.max(0, Math.min(from, totals.time - width));
    view.to = Math.min(view.from + width, totals.time);
  }
  const timeAt = (event) => { const box = place("canvas").getBoundingClientRect(); return view.from + ((view.to - view.from) * (event.clientX - box.left - LEFT)) / (box.width - LEFT); };

  function wheel(event) {
    if (document.activeElement !== place("canvas") && !event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
    paint();
  }

  function timelineKey(event) {
    const keys = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => zoom(Infinity), ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), n: () => step(1), p: () => step(-1) };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
    paint();
  }

  function step(by) {
    const { found } = inView();
    if (!found.length) return;
    const now = found.indexOf(view.chosen);
    choose(now < 0 ? found[0] : found[Math.max(0, Math.min(found.length - 1, now + by))]);
  }

  function choose(i) {
    view.chosen = i;
    const node = timeline.node[i], lane = timeline.lanes[timeline.lane[i]].name, moves = lane !== "compute";
    const facts = moves ? `, ${show("bytes", timeline.bytes[i])} over ${lane}, exposed ${show("seconds", timeline.exposed[i])}` : "";
    place("timeline-readout").replaceChildren(make("b", {}, names[timeline.name[i]]), ` from ${showStep("seconds", timeline.start[i], timeline.duration[i] / 10 || 1, totals.time)} for ${show("seconds", timeline.duration[i])}${facts}. `, code(describe(node)));
  }

  function drag(event) {
    const canvas = place("canvas"), start = event.clientX, from = view.from, perPixel = (view.to - view.from) / (canvas.clientWidth - LEFT);
    let moved = false;
    const follow = (next) => { if (Math.abs(next.clientX - start) > 3) moved = true; if (moved) { look(from - (next.clientX - start) * perPixel, view.to - view.from); paint(); } };
    const drop = (last) => {
      canvas.removeEventListener("pointermove", follow);
      if (!moved) { const found = boxAt(last); if (found !== undefined) { choose(found); paint(); } }
    };
    canvas.setPointerCapture(event.pointerId);
    canvas.addEventListener("pointermove", follow);
    canvas.addEventListener("pointerup", drop, { once: true });
  }

  function boxAt(event) {
    const { lanes, found } = inView(), box = place("canvas").getBoundingClientRect(), time = timeAt(event);
    const lane = lanes[Math.floor((event.clientY - box.top) / LANE)], slack = (2 * (view.to - view.from)) / box.width;
    return found.find((i) => timeline.lane[i] === lane && timeline.start[i] - slack <= time && time <= timeline.start[i] + timeline.duration[i] + slack);
  }

  function sliceTable() {
    const { found } = inView(), most = 100;
    const longest = [...found].sort((a, b) => timeline.duration[b] - timeline.duration[a]).slice(0, most).sort((a, b) => a - b);
    const said = found.length > most ? `The ${most} longest of ${show("count", found.length)} boxes in view` : `The ${found.length} boxes in view`;
    place("slice-table").replaceChildren(table(said, [
      text("What", (i) => names[timeline.name[i]]), text("Lane", (i) => timeline.lanes[timeline.lane[i]].name), text("Where", (i) => code(describe(timeline.node[i]))),
      { title: "Start", kind: "seconds", of: (i) => timeline.start[i] }, { title: "Duration", kind: "seconds", of: (i) => timeline.duration[i] },
      { title: "Exposed", kind: "seconds", of: (i) => timeline.exposed[i] }, { title: "Received", kind: "bytes", of: (i) => timeline.bytes[i] }], longest));
  }

  // Calls and assumptions

  function calls() {
    place("calls").append(
      make("p", { class: "note" }, "The ten calls that cost most, equal layers together. Where the planner finds a cheaper way for a call and the calls around it, it stands beside: their price alone, forward and without overlap, now and with what to ask for."),
      table("The calls that cost most", [
        text("Call", (row) => make("span", {}, code(`${row.op} (${row.phase})`), [row.name ? counted(row) : null, row.where].filter(Boolean).map((each) => make("span", { class: "note line" }, each)))),
        { ...TIMES[0] }, TIMES[1], { ...TIMES[2] }, { ...TIMES[3] }, text("Moves", (row) => row.moves.length ? summary(row.moves) : "nothing"),
        text("Cheaper", (row) => cheaper(row.alternative))], figures.calls));
  }

  function summary(moves) {
    const counts = new Map();
    for (const { kind, op, axis, devices, bytes } of moves) {
      const said = `${kind}${op ? `(${op})` : ""} over ${axis} of ${devices}: ${show("bytes", bytes)}`;
      counts.set(said, (counts.get(said) || 0) + 1);
    }
    return make("span", {}, [...counts].map(([what, count]) => make("div", {}, count > 1 ? `${what} ×${count}` : what)));
  }

  function cheaper(found) {
    if (!found) return "nothing cheaper is known";
    const price = (value, of) => make("span", { "data-of": of, "data-value": value }, show("seconds", value));
    return make("div", {}, price(found.after, "after"), " instead of ", price(found.before, "before"), ` for ${found.calls} calls, with`,
      make("ul", { class: "ask" }, found.asks.map((each) => make("li", {}, code(each)))));
  }

  const assumptions = () => place("assumptions").append(
    table("Every figure and simplification that the answers rest on", [text("What", (row) => row.what), text("Value", (row) => row.value), text("Source", (row) => code(row.source))], figures.assumptions));

  headline();
  timeTable();
  plans();
  memoryParts();
  modules();
  links();
  timelineParts();
  calls();
  assumptions();
  window.addEventListener("resize", paint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
})();
