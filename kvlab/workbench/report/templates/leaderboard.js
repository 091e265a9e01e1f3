// Policies by bytes and by a measure: filters, a chart with its Pareto front, and a table of what is drawn.
(() => {
  const { charts, looks, slack, references } = JSON.parse(document.getElementById("data").textContent);
  const form = document.querySelector("form.choices");
  const plot = document.querySelector(".plot");
  const svg = plot.querySelector("svg");
  const tip = plot.querySelector(".tip");
  const MIB = 2 ** 20;
  const RADIUS = 5.5;
  const FULL = "full";
  const MOMENT = { read: "read, then compressed", "held back": "held back: compressed before it" };
  const LOSSES = "Less is better. Both axes are logarithmic, so the full cache, which loses nothing, is a line at its bytes.";
  const picked = new Set();
  const order = { column: "", down: false };
  let view;

  // ------------------------------------------------------------------------------------------------ small things

  function node(parent, name, attributes = {}, text = "") {
    const inSvg = parent instanceof SVGElement || name === "svg";
    const made = inSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    parent.append(made);
    return made;
  }

  function polygon(corners, turn = 0, inner = 1) {
    const count = inner === 1 ? corners : 2 * corners;
    const at = (n) => {
      const angle = (2 * Math.PI * n) / count - Math.PI / 2 + turn;
      const far = n % 2 && inner !== 1 ? inner : 1;
      return `${(far * Math.cos(angle)).toFixed(3)},${(far * Math.sin(angle)).toFixed(3)}`;
    };
    return `M${Array.from({ length: count }, (_, n) => at(n)).join("L")}Z`;
  }

  const half = Math.PI / 2;
  const plus = "M-.35,-1H.35V-.35H1V.35H.35V1H-.35V.35H-1V-.35H-.35Z";
  // The markers of kvlab's figures, by the letters that matplotlib gives them.
  const SHAPES = {
    o: "M1,0A1,1 0 1 1 -1,0A1,1 0 1 1 1,0Z",
    s: "M-.85,-.85H.85V.85H-.85Z",
    "^": polygon(3),
    ">": polygon(3, half),
    v: polygon(3, 2 * half),
    "<": polygon(3, -half),
    D: polygon(4),
    d: "M0,-1.1L.65,0L0,1.1L-.65,0Z",
    p: polygon(5),
    h: polygon(6),
    P: plus,
    X: plus,
    x: "M-.8,-.8L.8,.8M-.8,.8L.8,-.8",
    "*": polygon(5, 0, 0.45),
  };

  function shape(parent, policy) {
    const { marker } = looks[policy];
    const turn = marker === "X" ? "rotate(45)" : "";
    return node(parent, "path", {
      class: marker === "x" ? "shape line" : "shape",
      d: SHAPES[marker] || SHAPES.o,
      transform: `scale(${RADIUS}) ${turn}`,
      "vector-effect": "non-scaling-stroke",
    });
  }

  function swatch(parent, point) {
    const style = `--colour: ${looks[point.policy].colour}`;
    const drawn = node(parent, "svg", { class: "swatch", viewBox: "-7 -7 14 14", "aria-hidden": "true", style });
    drawn.classList.toggle("open", !point.rival);
    shape(drawn, point.policy);
  }

  const few = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 });
  const inBytes = (bytes) => `${few(bytes / MIB)} MiB`;
  const inShare = (share) => (share === null ? "–" : `${few(100 * share)} %`);
  const shown = (value) => (view.percent ? `${(100 * value).toFixed(0)} %` : value.toFixed(3));
  const between = (point) => `${shown(point.low).replace(" %", "")} to ${shown(point.high)}`;
  // A budget below one is a share of the prompt.
  const inBudget = (budget) => (budget > 0 && budget < 1 ? `${few(100 * budget)} %` : budget);
  const budgeted = (point) => (point.budget ? `${point.name} at ${inBudget(point.budget)}` : point.name);

  // ------------------------------------------------------------------------------------------------ what is chosen

  const value = (name) => form.elements[name].value;

  function offer(name, options, wanted) {
    const select = form.elements[name];
    select.replaceChildren();
    const groups = {};
    for (const { key, text = key, group = "" } of options) {
      const parent = group ? (groups[group] ??= node(select, "optgroup", { label: group })) : select;
      node(parent, "option", { value: key }, text);
    }
    if (options.some(({ key }) => key === wanted)) select.value = wanted;
    select.closest("label").hidden = options.length < 2;
  }

  // Each choice narrows what the next ones offer; what was chosen stays where it is still offered.
  function choose(wanted) {
    if (charts.some(({ model }) => model === wanted.model)) form.elements.model.value = wanted.model;
    const ofModel = charts.filter(({ model }) => model === value("model"));
    const measures = new Map(ofModel.map(({ measure, group }) => [measure, { key: measure, group }]));
    offer("measure", [...measures.values()], wanted.measure);
    const alike = ofModel.filter(({ measure }) => measure === value("measure"));
    offer("question", alike.map(({ question }) => ({ key: question, text: MOMENT[question] || question })), wanted.question);
    view = alike.find(({ question }) => question === value("question"));
    const budgets = [...new Set(view.points.map(({ budget }) => budget).filter(Boolean))].sort((a, b) => a - b);
    offer("budget", [{ key: "", text: "all" }, ...budgets.map((key) => ({ key, text: inBudget(key) }))], wanted.budget);
    const sides = view.points.some(({ read_bytes }) => read_bytes !== null) ? ["stored", "read"] : ["stored"];
    offer("side", sides.map((key) => ({ key, text: key === "read" ? "read at a step" : "stored" })), wanted.side);
    if (wanted.unit) form.elements.unit.value = wanted.unit;
    form.elements.model.closest("label").hidden = form.elements.model.options.length < 2;
  }

  const chosen = () => Object.fromEntries([...new FormData(form)]);

  // As `equal_bytes.front`: nobody does as well with fewer bytes, nor better with as many.
  function front(points, size) {
    const loss = (point) => (view.higher ? -point.value : point.value);
    const rivals = points.filter((point) => point.rival);
    const least = (fits) => Math.min(Infinity, ...rivals.filter((other) => fits(size(other))).map(loss));
    return rivals
      .filter((point) => loss(point) <= least((other) => other <= size(point) * (1 + slack)))
      .filter((point) => loss(point) < least((other) => other < size(point)))
      .sort((a, b) => size(a) - size(b));
  }

  // ------------------------------------------------------------------------------------------------ the chart

  function logTicks(least, most, room) {
    for (const steps of [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
      const ticks = [];
      for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power++) {
        ticks.push(...steps.map((step) => step * 10 ** power).filter((tick) => tick >= least && tick <= most));
      }
      if (ticks.length <= room) return ticks;
    }
    return [];
  }

  function evenTicks(least, most) {
    const raw = (most - least) / 5;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 2.5, 5, 10].find((each) => each * power >= raw);
    const first = Math.ceil(least / step - 1e-9);
    return Array.from({ length: Math.floor(most / step + 1e-9) - first + 1 }, (_, n) => (first + n) * step);
  }

  function draw() {
    const side = value("side") || "stored";
    const asShare = value("unit") === "share";
    const unit = asShare ? (point) => 100 * point[side] : (point) => point[`${side}_bytes`] / MIB;
    const known = (point) => point[asShare ? side : `${side}_bytes`] !== null;
    const every = view.points.filter(({ budget }) => !budget || !value("budget") || budget === value("budget"));
    const points = every.filter(known);
    // Losses have a logarithmic axis. The full cache loses nothing, and is a line at its bytes.
    const isLine = ({ policy, value: loss }) => !view.higher && policy === FULL && loss === 0;
    const marked = points.filter((point) => !isLine(point));
    const best = front(points, (point) => point[`${side}_bytes`]);

    const width = plot.clientWidth;
    const narrow = width < 600;
    const height = narrow ? 400 : Math.min(560, Math.max(430, innerHeight - 350));
    const room = { left: narrow ? 42 : 58, right: narrow ? 10 : 24, top: 14, bottom: 52 };
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);

    const sizes = points.map(unit);
    const [small, large] = [Math.min(...sizes) / 1.12, Math.max(...sizes) * 1.12];
    const heights = marked.flatMap(({ low, high, value: middle }) => [low, high, middle]);
    const least = Math.min(...marked.map((point) => point.value).filter((each) => each > 0));
    const most = Math.max(...heights);
    const bottom = view.higher ? Math.max(0, 1.3 * Math.min(...heights) - 0.3 * most) : least / 1.35;
    const top = view.higher ? Math.min(1, most + 0.03) : most * 1.1;
    const x = (size) =>
      room.left + ((width - room.left - room.right) * Math.log(size / small)) / Math.log(large / small);
    const base = height - room.bottom;
    const up = (each) =>
      view.higher ? (each - bottom) / (top - bottom) : Math.log(Math.max(each, bottom) / bottom) / Math.log(top / bottom);
    const y = (each) => base - (base - room.top) * up(each);

    for (const tick of logTicks(small, large, narrow ? 6 : 12)) {
      node(svg, "line", { class: "grid", x1: x(tick), x2: x(tick), y1: room.top, y2: base });
      const text = `${few(tick)}${asShare ? " %" : ""}`;
      node(svg, "text", { x: x(tick), y: base + 18, "text-anchor": "middle" }, text);
    }
    for (const tick of view.higher ? evenTicks(bottom, top) : logTicks(bottom, top, 9)) {
      node(svg, "line", { class: "grid", x1: room.left, x2: width - room.right, y1: y(tick), y2: y(tick) });
      const text = view.percent ? `${Math.round(100 * tick)} %` : few(Math.abs(tick) < 1e-9 ? 0 : tick);
      node(svg, "text", { x: room.left - 7, y: y(tick) + 4, "text-anchor": "end" }, text);
    }
    const title = `bytes ${side === "read" ? "read at a step" : "stored"}, ${asShare ? "of the full cache" : "MiB"} (log)`;
    const middle = (room.left + width - room.right) / 2;
    node(svg, "text", { class: "axis", x: middle, y: height - 10, "text-anchor": "middle" }, title);

    const whole = points.find(({ policy }) => policy === FULL);
    if (whole && isLine(whole)) {
      node(svg, "line", { class: "whole", x1: x(unit(whole)), x2: x(unit(whole)), y1: room.top, y2: base });
      node(svg, "text", { x: x(unit(whole)) - 5, y: room.top + 10, "text-anchor": "end" }, "full cache");
    } else if (whole) {
      node(svg, "line", { class: "whole", x1: room.left, x2: width - room.right, y1: y(whole.value), y2: y(whole.value) });
    }
    for (const [called, mine] of grouped(marked)) {
      const line = [...mine].sort((a, b) => a.budget - b.budget).map((each) => `${x(unit(each))},${y(each.value)}`);
      const style = `--colour: ${looks[mine[0].policy].colour}`;
      if (line.length > 1) node(svg, "path", { class: "curve", d: `M${line.join("L")}`, "data-name": called, style });
    }
    if (best.length) {
      const steps = best.map((each) => `H${x(unit(each))}V${y(each.value)}`).join("");
      const start = `M${x(unit(best[0]))},${y(best[0].value)}`;
      node(svg, "path", { class: "front", d: `${start}${steps}H${width - room.right}` });
    }
    const marks = marked.map((point) => mark(point, x(unit(point)), y(point.value), y(point.low), y(point.high), best));
    label(best, marks, { left: room.left - 2, right: width - room.right, bottom: base });
    legend(marked);
    table(every, best, side);
    say(every, points, marked, best, side);
    light();
  }

  function grouped(points) {
    const found = new Map();
    for (const point of points) found.set(point.name, [...(found.get(point.name) || []), point]);
    return found;
  }

  function mark(point, x, y, low, high, best) {
    const group = node(svg, "g", {
      class: `mark${point.rival ? "" : " open"}${best.includes(point) ? " on-front" : ""}`,
      style: `--colour: ${looks[point.policy].colour}`,
      "data-name": point.name,
      tabindex: 0,
      "aria-label": `${budgeted(point)}: ${shown(point.value)}`,
      transform: `translate(${x},${y})`,
    });
    node(group, "line", { class: "bar", x1: 0, x2: 0, y1: low - y, y2: high - y });
    node(group, "circle", { class: "hit", r: 11 });
    shape(group, point.policy);
    if (best.includes(point)) node(group, "circle", { class: "ring", r: RADIUS + 3.5 });
    const enter = () => light(point, { x, y });
    for (const event of ["pointerenter", "focus"]) group.addEventListener(event, enter);
    for (const event of ["pointerleave", "blur"]) group.addEventListener(event, () => light());
    group.addEventListener("click", () => pick(point.name, enter));
    return { group, point, x, y };
  }

  // The names of policies on the front, and of references: each once, where there is room.
  function label(best, marks, edge) {
    const boxes = marks.map(({ x, y }) => ({ left: x - 6, right: x + 6, top: y - 6, bottom: y + 6 }));
    const named = new Set();
    const compared = marks.map(({ point }) => point).filter(({ policy }) => references.includes(policy));
    for (const point of [...best, ...compared]) {
      if (named.has(point.name)) continue;
      const { x, y } = marks.find((each) => each.point === point);
      const text = node(svg, "text", { class: point.rival ? "label" : "label reference", "data-name": point.name }, point.name);
      const { width } = text.getBBox();
      const spots = [[9, 15], [9, -8], [-width - 9, 15], [-width - 9, -8], [-width / 2, 24], [-width / 2, -14]];
      const boxOf = ([right, down]) => ({ left: x + right, right: x + right + width, top: y + down - 10, bottom: y + down + 2 });
      const free = spots.find((spot) => {
        const box = boxOf(spot);
        const apart = (other) =>
          box.right < other.left || box.left > other.right || box.bottom < other.top || box.top > other.bottom;
        return box.left > edge.left && box.right < edge.right + 8 && box.top > 0 && box.bottom < edge.bottom && boxes.every(apart);
      });
      if (!free) {
        text.remove();
        continue;
      }
      text.setAttribute("x", x + free[0]);
      text.setAttribute("y", y + free[1]);
      boxes.push(boxOf(free));
      named.add(point.name);
    }
  }

  // ------------------------------------------------------------------------------------------------ beside the chart

  function legend(points) {
    const chips = document.querySelector(".chips");
    chips.replaceChildren();
    for (const [called, [point]] of grouped(points)) {
      const chip = node(chips, "button", { type: "button", "data-name": called, "aria-pressed": picked.has(called) });
      swatch(chip, point);
      chip.append(called);
      chip.addEventListener("click", () => pick(called));
      chip.addEventListener("pointerenter", () => light(point));
      chip.addEventListener("pointerleave", () => light());
    }
  }

  function say(every, points, marked, best, side) {
    const about = view.question ? `, question ${view.question}` : "";
    const title = `${view.measure} against bytes ${side} on ${view.model}${about}`;
    document.querySelector("#board h2").textContent = title[0].toUpperCase() + title.slice(1);
    document.querySelector(".about").textContent = `${view.about} ${view.higher ? "More is better." : LOSSES}`;
    const policies = new Set(marked.map((point) => point.name)).size;
    const left = every.length - points.length;
    const without = left ? `; ${left} without a known share stand in the table alone` : "";
    document.querySelector("#said output").textContent =
      `${marked.length} marks of ${policies} policies, ${best.length} on the front${without}.`;
    svg.setAttribute("aria-label", document.querySelector("#board h2").textContent);
  }

  function table(points, best, side) {
    const columns = [
      { key: "name", text: "Policy", of: (point) => point.name },
      { key: "budget", text: "Budget", of: (point) => Number(point.budget || Infinity), number: true },
      { key: "share", text: "Of full", of: (point) => point[side] ?? Infinity, number: true },
      { key: "bytes", text: "MiB", of: (point) => point[`${side}_bytes`], number: true, also: "mib" },
      { key: "value", text: view.percent ? "Score" : "Value", of: (point) => point.value, number: true },
      { key: "interval", text: "95 % interval", of: (point) => point.high - point.low, number: true },
      { key: "n", text: view.unit === "answers" ? "Answers" : "Documents", of: (point) => point.n, number: true, also: "count" },
    ];
    const by = columns.find(({ key }) => key === order.column) || columns[4];
    const down = order.column ? order.down : view.higher;
    const rows = [...points].sort((a, b) => {
      const [one, other] = [by.of(a), by.of(b)];
      const found = one === other ? a.name.localeCompare(b.name) : one < other ? -1 : 1;
      return down && one !== other ? -found : found;
    });
    const head = document.querySelector(".ranking thead tr");
    const focused = head.contains(document.activeElement) ? document.activeElement.dataset.key : "";
    head.replaceChildren();
    for (const column of columns) {
      const cell = node(head, "th", { scope: "col", class: `${column.number ? "n" : ""} ${column.also || ""}` });
      if (column === by) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const arrow = column === by ? (down ? " ▾" : " ▴") : "";
      const button = node(cell, "button", { type: "button", "data-key": column.key }, column.text + arrow);
      button.addEventListener("click", () => {
        order.down = column === by ? !down : false;
        order.column = column.key;
        table(points, best, side);
      });
      if (focused === column.key) button.focus();
    }
    const body = document.querySelector(".ranking tbody");
    body.replaceChildren();
    for (const point of rows) {
      const row = node(body, "tr", { "data-name": point.name });
      const first = node(row, "td");
      swatch(first, point);
      first.append(...point.name.split(/(?<=_)/).flatMap((part) => [part, document.createElement("wbr")]));
      if (best.includes(point)) node(first, "span", { class: "flag" }, "front");
      node(row, "td", { class: "n" }, point.budget ? inBudget(point.budget) : "–");
      node(row, "td", { class: "n" }, inShare(point[side]));
      node(row, "td", { class: "n mib" }, few(point[`${side}_bytes`] / MIB));
      node(row, "td", { class: "n" }, shown(point.value));
      node(row, "td", { class: "n" }, between(point));
      node(row, "td", { class: "n count" }, String(point.n));
      row.addEventListener("pointerenter", () => light(point));
      row.addEventListener("pointerleave", () => light());
    }
  }

  // On a touch screen the pointer has left the mark before its click: `after` shows again what it says.
  function pick(called, after = () => light()) {
    if (!picked.delete(called)) picked.add(called);
    for (const chip of document.querySelectorAll(".chips button")) {
      chip.setAttribute("aria-pressed", picked.has(chip.dataset.name));
    }
    after();
  }

  // What the pointer is on, and what was picked, stand out; with a place, a box says what the mark is.
  function light(point = null, place = null) {
    const lit = new Set([...picked, ...(point ? [point.name] : [])]);
    plot.classList.toggle("narrowed", lit.size > 0);
    for (const each of document.querySelectorAll("[data-name]")) {
      each.classList.toggle("lit", each.tagName === "TR" ? point?.name === each.dataset.name : lit.has(each.dataset.name));
    }
    tip.hidden = !place;
    if (!place) return;
    const side = value("side") || "stored";
    tip.replaceChildren();
    node(tip, "b", {}, budgeted(point));
    node(tip, "div", {}, `${shown(point.value)} (${between(point)})`);
    node(tip, "small", {}, `${side}: ${inBytes(point[`${side}_bytes`])}, ${inShare(point[side])} of the full cache`);
    node(tip, "small", {}, `${point.n} ${view.unit}`);
    const right = place.x + 16 + tip.offsetWidth < plot.clientWidth;
    tip.style.left = `${right ? place.x + 16 : Math.max(0, place.x - 16 - tip.offsetWidth)}px`;
    tip.style.top = `${Math.max(0, place.y - tip.offsetHeight / 2)}px`;
  }

  // ------------------------------------------------------------------------------------------------ start

  // An address with what was chosen opens the same view; `#table` and the like only lead to a part of the page.
  function start() {
    if (view && !location.hash.includes("=")) return;
    choose(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
    draw();
  }

  form.addEventListener("input", () => {
    choose(chosen());
    picked.clear();
    draw();
    history.replaceState(null, "", `#${new URLSearchParams(chosen())}`);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", start);
  let drawn = 0;
  new ResizeObserver(() => {
    if (drawn !== plot.clientWidth) draw();
    drawn = plot.clientWidth;
  }).observe(plot);
  form.hidden = false;
  start();
})();
