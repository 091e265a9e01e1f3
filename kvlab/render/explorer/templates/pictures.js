// The pictures of the explorer's page: each is an SVG that can be saved alone. page.js, which follows, shares the scope.

// ------------------------------------------------------------------ pictures

const FONT = 'font-family="system-ui,sans-serif" font-size="11" style="fill:var(--soft)"';
const widths = new Map(); // of figures: to ask after a change makes the browser lay the page out again
function wide(name) {
  if (!widths.has(name)) widths.set(name, Math.max(220, byId(name).clientWidth));
  return widths.get(name);
}
const tenth = value => Math.round(10 * value) / 10;
const box = (x, y, w, h) => `M${tenth(x)} ${tenth(y)}h${tenth(w)}v${tenth(h)}h${-tenth(w)}z`;
const write = (x, y, text, anchor = "middle") =>
  `<text x="${tenth(x)}" y="${tenth(y)}" text-anchor="${anchor}">${text}</text>`;

/** A grid of cells; look(row, column) is a style, or "" for none. Neighbours that look alike share a piece. */
function grid(x, y, w, h, rows, columns, look) {
  const pieces = new Map();
  for (let r = 0; r < rows; r++) {
    for (let c = 0, start = 0, present = look(r, 0); c < columns; c++) {
      const next = c + 1 < columns ? look(r, c + 1) : null;
      if (next === present) continue;
      if (present)
        pieces.set(present, (pieces.get(present) || "") + box(x + start * w, y + r * h, (c + 1 - start) * w, h));
      start = c + 1;
      present = next;
    }
  }
  return [...pieces].map(([style, path]) => `<path style="${style}" d="${path}"/>`).join("");
}

/** The style of a share, on a root scale of 16 levels. */
const shade = (colour, value) => {
  const level = Math.round(16 * Math.sqrt(Math.min(1, Math.max(0, value))));
  return level ? `fill:var(--${colour});fill-opacity:${level / 16}` : "";
};
const frame = (x, y, w, h, style = "stroke:var(--focus);stroke-width:2") =>
  `<path style="fill:none;${style}" d="${box(x, y, w, h)}"/>`;

const pictures = {};
/** Put a picture in its figure. find(x, y) gives what lies there: {say, go} or nothing. */
function picture(name, title, note, width, height, drawing, find) {
  const figure = byId(name);
  if (!figure.firstChild) {
    const button = form => `<button data-save="${form}" title="save this picture">${form.toUpperCase()}</button>`;
    figure.innerHTML = `<figcaption><b></b><span class="note"></span><span class="tools">${button("svg")}${button("png")}
      </span></figcaption><div></div>`;
    figure.lastChild.addEventListener("pointermove", event => tip(event, found(name, event)?.say));
    figure.lastChild.addEventListener("pointerleave", () => tip());
    figure.lastChild.addEventListener("click", event => found(name, event)?.go());
  }
  figure.querySelector("b").textContent = title;
  figure.querySelector(".note").innerHTML = note;
  const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
  figure.lastChild.innerHTML = `<svg xmlns="http://www.w3.org/2000/svg" ${size} role="img" aria-label="${safe(title)}"
    ${FONT}>${drawing}</svg>`;
  pictures[name] = find;
}

function found(name, event) {
  const svg = byId(name).querySelector("svg"),
    frame = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / frame.width;
  return pictures[name]((event.clientX - frame.left) * scale, (event.clientY - frame.top) * scale);
}

function tip(event, words) {
  const shown = byId("tip");
  shown.hidden = !words;
  if (!words) return;
  shown.textContent = words;
  shown.style.left = `${Math.min(event.clientX + 14, innerWidth - shown.offsetWidth - 6)}px`;
  shown.style.top = `${event.clientY + 16}px`;
}

function ticks(end, most = 6) {
  const step =
    [1, 2, 5]
      .flatMap(m => [0, 1, 2, 3, 4, 5].map(e => m * 10 ** e))
      .sort((a, b) => a - b)
      .find(each => end / each <= most) || end;
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, i) => i * step);
}

/** Numbers under a picture whose horizontal axis is the position, and the axis' name. */
function positionAxis(left, room, end, y) {
  const marks = ticks(end)
    .slice(1)
    .filter(p => p < end * (1 - 80 / room));
  const numbers = marks.map(p => write(left + (p * room) / end, y, p.toLocaleString("en")));
  return numbers.join("") + write(left, y, "0", "start") + write(left + room, y, "position", "end");
}

const stepAxis = (left, w, y, most) =>
  ticks(steps, most)
    .filter(Boolean)
    .map(t => write(left + (t - 0.5) * w, y, t))
    .join("");
const stepAt = (x, left, w) => Math.floor((x - left) / w) + 1;
const bars = (shares, left, top, w, tall) =>
  shares.map((each, t) => box(left + t * w, top + tall * (1 - each), Math.max(1, w - 1), tall * each)).join("");

function drawStrip(weights, masks) {
  const width = wide("strip"),
    seen = prompt + at.step,
    bins = Math.min(seen, Math.floor(width / 2));
  const read = new Float32Array(bins),
    lost = new Float32Array(bins),
    held = masks.map(() => new Uint8Array(bins));
  const best = new Int32Array(bins).fill(-1),
    bin = p => Math.min(bins - 1, Math.floor((p * bins) / seen));
  let drawn = 0;
  for (let p = 0; p < seen; p++) {
    const b = bin(p);
    (masks[at.policy][p] ? read : lost)[b] += weights[p];
    drawn += weights[p];
    if (best[b] < 0 || weights[p] > weights[best[b]]) best[b] = p;
    for (let i = 0; i < masks.length; i++) held[i][b] |= masks[i][p];
  }
  const top = Math.max(...read.map((each, b) => each + lost[b]), 1e-6),
    w = width / bins,
    tall = 70;
  const bar = value => Math.sqrt(value / top) * tall;
  let gone = "",
    blue = "";
  for (let b = 0; b < bins; b++) {
    const all = bar(read[b] + lost[b]),
      part = (all * read[b]) / (read[b] + lost[b] || 1);
    if (part > 0.4) blue += box(b * w, tall - part, w, part);
    if (all - part > 0.4) gone += box(b * w, tall - all, w, all - part);
  }
  const band = i => grid(0, tall + 4 + 7 * i, w, 5, 1, bins, (_, b) => (held[i][b] ? `fill:var(--p${i})` : ""));
  const low = tall + 4 + 7 * masks.length,
    edge = tenth((prompt * width) / seen);
  const chosen =
    at.token >= 0 && at.token < seen
      ? frame((at.token * width) / seen - 2, 0, 5, low - 2, "stroke:var(--wanted);stroke-width:2")
      : "";
  const rest = 1 - drawn > 0.005 ? `; ${percent(1 - drawn)} lies on tokens too weak to draw` : "";
  const note = `root scale up to ${percent(top)}; bands: read by each policy; dashed: end of the prompt${rest}`;
  const drawing = [
    `<path style="fill:var(--lost)" d="${gone}"/>`,
    `<path style="fill:var(--read)" d="${blue}"/>`,
    ...masks.map((_, i) => band(i)),
    chosen,
    `<path style="stroke:var(--soft);stroke-dasharray:3 3" d="M${edge} 0V${tall}"/>`,
    positionAxis(0, width, seen, low + 13),
  ];
  picture("strip", "Attention of the query by position", note, width, low + 18, drawing.join(""), (x, y) => {
    const p = best[Math.min(bins - 1, Math.max(0, Math.floor(x / w)))];
    return p < 0 ? null : { say: `token ${p}: ${percent(weights[p])}`, go: () => choose(p) };
  });
}

/** Maps of layers by columns side by side, as many in a line as there is room for. */
function drawMaps(name, title, note, maps, columns, axis) {
  const width = wide(name),
    left = 22,
    tall = layers.length > 40 ? 6 : 9,
    titles = 30;
  const line = Math.min(maps.length, Math.max(1, Math.floor(width / Math.max(118, left + 14 + 4 * columns))));
  const cell = Math.min(15, (width / line - left - 14) / columns),
    each = Math.max(left + columns * cell + 14, 118);
  const high = titles + layers.length * tall + 30;
  const stride = Math.ceil(14 / cell),
    drawn = [];
  const corner = i => [left + (i % line) * each, titles + Math.floor(i / line) * high];
  maps.forEach((map, i) => {
    const [x, y] = corner(i);
    drawn.push(`<g style="fill:var(--ink)" font-weight="600">${write(x, y - 17, safe(map.name), "start")}</g>`);
    drawn.push(write(x, y - 5, map.about, "start"));
    drawn.push(grid(x, y, cell, tall, layers.length, columns, map.look));
    drawn.push(frame(x, y, columns * cell, layers.length * tall, "stroke:var(--line)"));
    if (map.row !== undefined) drawn.push(frame(x + map.column * cell, y + map.row * tall, cell, tall));
    for (let r = 0; r < layers.length; r += Math.ceil(layers.length / 8)) {
      drawn.push(write(x - 4, y + r * tall + 9, layers[r], "end"));
    }
    for (let c = 0; c < columns; c += stride) {
      drawn.push(write(x + (c + 0.5) * cell, y + layers.length * tall + 12, c));
    }
    drawn.push(write(x, y + layers.length * tall + 24, axis, "start"));
  });
  picture(name, title, note, width, Math.ceil(maps.length / line) * high, drawn.join(""), (px, py) => {
    for (let i = 0; i < maps.length; i++) {
      const [x, y] = corner(i),
        column = Math.floor((px - x) / cell),
        row = Math.floor((py - y) / tall);
      if (column >= 0 && column < columns && row >= 0 && row < layers.length) return maps[i].find(row, column);
    }
    return null;
  });
}

function lossMaps() {
  const losses = policies.map((_, i) => run(i)).map(it => (row, head) => it.lostAt(row, head, at.step));
  const place = (row, head) => `layer ${layers[row]}, head ${head}: `;
  const go = (row, head) => () => move({ row, head });
  const maps = policies.map((name, i) => ({
    name,
    about: `${percent(losses[i](at.row, at.head))} here`,
    look: (row, head) => shade("lost", losses[i](row, head)),
    find: (row, head) => ({
      say: place(row, head) + `${name} lost ${percent(losses[i](row, head))}`,
      go: go(row, head),
    }),
  }));
  if (at.versus !== at.policy && policies.length > 1) {
    const apart = (row, head) => losses[at.policy](row, head) - losses[at.versus](row, head);
    const points = value => {
      const whole = Math.round(100 * Math.abs(value));
      return `${whole ? (value < 0 ? "−" : "+") : ""}${whole} points`;
    };
    maps.push({
      name: "difference",
      about: points(apart(at.row, at.head)) + " here",
      look: (row, head) => shade(apart(row, head) > 0 ? "lost" : "read", Math.abs(apart(row, head))),
      find: (row, head) => ({ say: place(row, head) + points(apart(row, head)), go: go(row, head) }),
    });
  }
  maps.forEach(map => Object.assign(map, { row: at.row, column: at.head }));
  const own = safe(policies[at.policy]);
  const option = i => `<option value="${i}"${i === at.versus ? " selected" : ""}>${safe(policies[i])}</option>`;
  const others = policies.map((_, i) => (i === at.policy ? "" : option(i))).join("");
  const note =
    `${own} minus <select id="versus" aria-label="difference from">${others}</select>: orange where ${own} loses ` +
    "more, blue where less";
  drawMaps("maps", "Attention lost at this step, layer by head", note, maps, heads, "query head");
}

function drawCurve() {
  const width = wide("curve"),
    tall = 90,
    left = 40,
    w = (width - left - 2) / steps,
    top = 4;
  const losses = it => Array.from({ length: steps }, (_, t) => it.lostAt(at.row, at.head, t + 1));
  const values = policies.map((_, i) => losses(run(i)));
  const line = each =>
    each.map((value, t) => `${tenth(left + (t + 0.5) * w)} ${tenth(top + tall * (1 - value))}`).join("L");
  const drawing = [
    `<path style="fill:var(--lost);fill-opacity:.55" d="${bars(values[at.policy], left, top, w, tall)}"/>`,
    ...values.map((each, i) => `<path style="fill:none;stroke:var(--p${i});stroke-width:2" d="M${line(each)}"/>`),
    ...[0, 0.5, 1].map(value => write(left - 4, 8 + tall * (1 - value), `${100 * value} %`, "end")),
    stepAxis(left, w, tall + 17, Math.min(8, Math.floor(width / 40))),
    write(width, tall + 30, "step", "end"),
    frame(left + (at.step - 1) * w, 3, Math.max(2, w), tall + 2),
  ];
  const note = `bars: ${safe(policies[at.policy])}`;
  picture("curve", "Lost by this head at each step", note, width, tall + 34, drawing.join(""), x => {
    const step = stepAt(x, left, w);
    if (step < 1 || step > steps) return null;
    const said = policies.map((name, i) => `${name} ${percent(values[i][step - 1])}`).join(", ");
    return { say: `step ${step}: ${said}`, go: () => move({ step }) };
  });
}

const FAINT = 0.002; // of the attention: below it a cell of the head's picture is left empty

function drawMatrix() {
  const width = wide("matrix"),
    left = 28,
    room = width - left,
    bins = Math.min(length, Math.floor(room / 3));
  const w = room / bins,
    h = Math.max(4, Math.min(12, Math.round(200 / steps))),
    it = run();
  const worth = [],
    held = [],
    best = [];
  for (let step = 1; step <= steps; step++) {
    const weights = weightsOf(at.row, at.head, step),
      mask = it.mask(it.read, step, at.row, at.head);
    const most = new Float32Array(bins),
      any = new Int8Array(bins).fill(-1),
      place = new Int32Array(bins).fill(-1);
    for (let p = 0; p < prompt + step; p++) {
      const b = Math.floor((p * bins) / length);
      if (place[b] < 0 || weights[p] > most[b]) [most[b], place[b]] = [weights[p], p];
      any[b] = Math.max(any[b], mask[p]);
    }
    // A bin is of the colour of its most attended token.
    worth.push(most.map((value, b) => (place[b] < 0 || mask[place[b]] ? value : -value)));
    held.push(any);
    best.push(place);
  }
  const colour = value => shade(value < 0 ? "lost" : "read", Math.abs(value) / 0.25);
  const low = steps * h,
    numbers = ticks(steps, 5).filter(Boolean);
  const drawing = [
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse">',
    '<path style="stroke:var(--line);fill:none" d="M0 5L5 0"/></pattern></defs>',
    // Most is evicted: what is kept, or not there yet, is laid over the hatching.
    `<path style="fill:url(#hatch)" d="${box(left, 0, room, low)}"/>`,
    grid(left, 0, w, h, steps, bins, (r, b) => (held[r][b] ? "fill:var(--page)" : "")),
    grid(left, 0, w, h, steps, bins, (r, b) => (Math.abs(worth[r][b]) < FAINT ? "" : colour(worth[r][b]))),
    frame(left, (at.step - 1) * h, room, h, "stroke:var(--focus);stroke-width:1.2"),
    frame(left, 0, room, low, "stroke:var(--line)"),
    ...numbers.map(t => write(left - 4, (t - 0.5) * h + 4, t, "end")),
    positionAxis(left, room, length, low + 13),
  ];
  const title = `Attention of layer ${layers[at.row]}, head ${at.head}: step by position`;
  const own = safe(policies[at.policy]);
  const note = `blue: read, orange: lost under ${own}; hatched: evicted or not read; full colour from 25 %`;
  picture("matrix", title, note, width, low + 18, drawing.join(""), (x, y) => {
    const step = Math.floor(y / h) + 1,
      b = Math.floor((x - left) / w);
    const p = best[step - 1]?.[b] ?? -1;
    if (p < 0) return null;
    const value = worth[step - 1][b];
    return {
      say: `step ${step}, token ${p}: ${percent(Math.abs(value))}, ${value < 0 ? "lost" : "read"}`,
      go: () => {
        move({ step, token: p });
        scrollToToken(p);
      },
    };
  });
}

// ------------------------------------------------------------------ one token

function whoWanted(p) {
  const most = new Float32Array(layers.length * heads),
    when = new Uint8Array(most.length).fill(1),
    asked = new Array(steps).fill(0);
  for (let q = 0; q < most.length; q++) {
    for (let step = Math.max(1, p - prompt + 1); step <= steps; step++) {
      const value = share[attention[(q * steps + step - 1) * length + p]];
      if (value >= 0.01) asked[step - 1]++;
      if (value > most[q]) [most[q], when[q]] = [value, step];
    }
  }
  return { most, when, asked };
}

/** After which step each set of a policy dropped a token: 0 after the prompt; `steps`: never. */
function drops(it, p) {
  const first = Math.max(1, p - prompt + 1),
    found = [];
  for (let row = 0; row < layers.length; row++) {
    for (let set = 0; set < it.sets; set++) {
      let step = steps;
      while (step >= first && !it.has(it.stored, step, row, set, p)) step--;
      found.push(step < first ? 0 : step);
    }
  }
  return found;
}

/** What became of a token; a policy that selects may keep it and yet not read it at the step that is shown. */
function fate(it, row, head, last, p) {
  const set = it.set(head),
    unread = it.has(it.stored, at.step, row, set, p) && !it.has(it.read, at.step, row, set, p);
  const end =
    last === steps
      ? "kept to the end"
      : last
        ? `dropped after step ${last}`
        : p < prompt
          ? "dropped after the prompt"
          : "never stored";
  return unread ? `${end}, not read at this step` : end;
}

/** Maps of one token: who wanted it most, and when each policy dropped it. */
function drawFates(p, most, when, dropped) {
  const here = (row, head) => `layer ${layers[row]}, head ${head}: `;
  const wanted = {
    name: "wanted by",
    about: "most at any step",
    look: (row, head) => shade("wanted", most[row * heads + head] / 0.25),
    find: (row, head) => ({
      say: `${here(row, head)}${percent(most[row * heads + head])} at step ${when[row * heads + head]}`,
      go: () => move({ row, head, step: when[row * heads + head] }),
    }),
  };
  const fates = policies.map((name, i) => {
    const it = run(i),
      last = (row, head) => dropped[i][row * it.sets + it.set(head)];
    return {
      name,
      about: `keeps ${percent(dropped[i].filter(each => each === steps).length / dropped[i].length)}`,
      look: (row, head) => {
        const step = last(row, head),
          left = step === steps ? 1 : step && (0.6 * (step + 1)) / steps;
        return left ? `fill:var(--p${i});fill-opacity:${left.toFixed(2)}` : "";
      },
      find: (row, head) => ({
        say: `${here(row, head)}${name}, ${fate(it, row, head, last(row, head), p)}`,
        go: () => move({ row, head }),
      }),
    };
  });
  const maps = [wanted, ...fates].map(map => ({ ...map, row: at.row, column: at.head }));
  drawMaps(
    "wanted",
    "Who wanted it, and who keeps it",
    "full colour: kept to the end; paler: dropped earlier",
    maps,
    heads,
    "query head",
  );
}

function tellToken() {
  const p = at.token,
    panel = byId("token");
  panel.hidden = p < 0;
  if (p < 0) return;
  const { most, when, asked } = whoWanted(p);
  const order = [...most.keys()]
    .sort((a, b) => most[b] - most[a])
    .slice(0, 5)
    .filter(q => most[q] >= WEAK);
  const readers = (row, head, step) =>
    policies
      .map((_, i) => run(i))
      .map((it, i) => (it.has(it.read, step, row, it.set(head), p) ? swatch(i) : ""))
      .join("");
  const queries = order.map(q => {
    const row = Math.floor(q / heads),
      head = q % heads,
      step = when[q];
    return `<tr data-go data-row="${row}" data-head="${head}" data-step="${step}"><td class="n">${percent(most[q])}</td>
      <td>layer ${layers[row]}, head ${head}, step ${step}</td><td>${readers(row, head, step)}</td></tr>`;
  });
  const dropped = policies.map((_, i) => drops(run(i), p));
  const lines = policies.map((name, i) => {
    const it = run(i),
      found = dropped[i],
      here = found[at.row * it.sets + it.set(at.head)];
    const kept = found.filter(last => last === steps).length,
      late = found.filter(last => last > 0 && last < steps);
    const never = found.length - kept - late.length;
    const [low, high] = [Math.min(...late), Math.max(...late)];
    const when = low === high ? `step ${low}` : `steps ${low} to ${high}`;
    const later = late.length ? `; ${late.length} dropped it after ${when}` : "";
    const first = p < prompt ? "dropped it after the prompt" : "dropped it at once";
    return `<li>${swatch(i)} <b>${safe(name)}</b>: ${kept} of ${count(found.length, "KV head")} keep it to the end,
      ${never} ${first}${later}. Here: ${fate(it, at.row, at.head, here, p)}.</li>`;
  });
  if (effects) lines.push(`<li>${safe(nats(p)).replace(/^./, letter => letter.toUpperCase())}.</li>`);
  const place = `${inline(p - 4, p)}<u>${inline(p, p + 1)}</u>${inline(p + 1, p + 5)}`;
  panel.innerHTML = `<div class="head"><b>Token ${p.toLocaleString("en")}: ${place}</b><span class="tools">
    <button data-close title="close (Esc)">✕</button></span></div><ul>${lines.join("")}</ul>
    <figure id="wanted"></figure><div class="parts"><figure id="asked"></figure><table><thead>
    <tr><th>attention</th><th>most at</th><th>read by</th></tr></thead><tbody>${queries.join("")}</tbody></table></div>`;
  widths.delete("wanted");
  widths.delete("asked");
  drawFates(p, most, when, dropped);
  drawAsked(asked);
}

function drawAsked(asked) {
  const width = wide("asked"),
    left = 28,
    tall = 44,
    w = (width - left) / steps,
    top = Math.max(1, ...asked);
  const drawing = [
    `<path style="fill:var(--wanted)" d="${bars(
      asked.map(each => each / top),
      left,
      2,
      w,
      tall,
    )}"/>`,
    write(left - 4, 11, top, "end"),
    write(left - 4, tall + 3, 0, "end"),
    stepAxis(left, w, tall + 14, 6),
    frame(left + (at.step - 1) * w, 1, Math.max(2, w), tall + 1),
  ];
  picture("asked", "Heads that gave it 1 % or more, by step", "", width, tall + 18, drawing.join(""), x => {
    const step = stepAt(x, left, w);
    if (step < 1 || step > steps) return null;
    return { say: `step ${step}: ${count(asked[step - 1], "head")}`, go: () => move({ step }) };
  });
}
