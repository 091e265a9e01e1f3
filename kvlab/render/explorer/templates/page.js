// The explorer's page. `about` says what was measured, `bytes` holds the numbers; `at` is what is shown.

const about = JSON.parse(document.getElementById("about").textContent);
const { tokens, prompt, length, steps, layers, heads, kvHeads, policies, budgets, effects } = about;
const bitBytes = Math.ceil(length / 8);
const STRONG = 0.05,
  WEAK = 0.0005,
  LEVELS = 8; // shares of the attention: in full colour, and not painted
const share = Float32Array.from({ length: 256 }, (_, level) => (level / 255) ** 2);
const at = { policy: 0, versus: 1, budget: 0, row: 0, head: 0, step: 1, token: -1, colour: "attention" };
const byId = name => document.getElementById(name);
let bytes,
  attention,
  naming,
  drawn,
  playing = null,
  hits = [],
  hit = -1;

// ------------------------------------------------------------------ numbers

async function unpack() {
  const packed = Uint8Array.from(atob(byId("data").textContent.trim()), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  bytes = await new Response(stream).arrayBuffer();
  attention = part(about.attention, Uint8Array);
}

function part([start, size], Kind) {
  return new Kind(bytes, start, size / Kind.BYTES_PER_ELEMENT);
}

/** A policy at a budget: what it holds at each step, and what each query loses. */
class Run {
  constructor(made) {
    Object.assign(this, made);
    this.read = unchanged(part(made.read, Uint8Array), made.sets);
    this.stored = made.stored ? unchanged(part(made.stored, Uint8Array), made.sets) : this.read;
    this.lost = part(made.lost, Uint16Array);
    this.error = part(made.error, Uint16Array);
    this.concentrated = part(made.concentrated, Uint16Array);
  }
  set(head) {
    return Math.floor((head * this.sets) / heads);
  }
  place(step, row, set) {
    return (((step - 1) * layers.length + row) * this.sets + set) * bitBytes;
  }
  mask(bits, step, row, head) {
    const start = this.place(step, row, this.set(head)),
      found = new Uint8Array(length);
    for (let p = 0; p < prompt + step; p++) found[p] = (bits[start + (p >> 3)] >> (7 - (p & 7))) & 1;
    return found;
  }
  has(bits, step, row, set, p) {
    return (bits[this.place(step, row, set) + (p >> 3)] >> (7 - (p & 7))) & 1;
  }
  lostAt(row, head, step) {
    return this.lost[query(row, head, step)] / 65535;
  }
}

function unchanged(changes, sets) {
  const bits = changes.slice(),
    stride = layers.length * sets * bitBytes;
  for (let i = stride; i < bits.length; i++) bits[i] ^= bits[i - stride];
  return bits;
}

const made = new Map();
function run(policy = at.policy) {
  const key = `${policies[policy]}@${budgets[at.budget]}`;
  if (!made.has(key)) made.set(key, new Run(about.runs[key]));
  return made.get(key);
}

const query = (row, head, step) => (row * heads + head) * steps + step - 1;

function weightsOf(row, head, step) {
  const start = query(row, head, step) * length,
    found = new Float32Array(length);
  for (let p = 0; p < prompt + step; p++) found[p] = share[attention[start + p]];
  return found;
}

function largest(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return { row: Math.floor(best / (heads * steps)), head: Math.floor(best / steps) % heads, step: (best % steps) + 1 };
}

// ------------------------------------------------------------------ words

const percent = value => `${(100 * value).toFixed(value >= 0.0995 || !value ? 0 : value >= 0.00995 ? 1 : 2)} %`;
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const safe = text => text.replace(/[&<>"]/g, letter => `&#${letter.charCodeAt(0)};`);
const named = code => `⟨U+${code.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
const visible = text =>
  text
    .replaceAll("\n", "↵\n")
    .replaceAll("\t", "⇥\t")
    .replace(/(?![\n\t\u200c-\u200f])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, named);
const inline = (from, to) => safe(visible(tokens.slice(Math.max(0, from), to).join("")).replaceAll("\n", " "));
const word = p => `“${safe(visible((tokens[p] || "").trim() || tokens[p] || `token ${p}`).replace("\n", ""))}”`;
const swatch = policy => `<span class="swatch" style="--swatch:var(--p${policy})"></span>`;

function tellFinding(weights, masks) {
  const lost = run().lostAt(at.row, at.head, at.step),
    name = safe(policies[at.policy]);
  const where = `At step ${at.step}, layer ${layers[at.row]}, head ${at.head}`;
  const [most] = mostLost(weights, masks[at.policy], 1);
  const rest = policies
    .map((other, i) => (i === at.policy ? "" : `${safe(other)} ${percent(run(i).lostAt(at.row, at.head, at.step))}`))
    .filter(Boolean);
  let said = `${where}, ${name} lost <b>${percent(lost)}</b> of the attention`;
  if (most && lost > WEAK) {
    said +=
      `; <b>${percent(Math.min(1, weights[most] / lost))}</b> of that went to <button class="plain" ` +
      `data-token="${most}">${word(most)}</button> (token ${most.toLocaleString("en")})`;
  }
  byId("finding").innerHTML = `${said}.${rest.length ? ` Others here: ${rest.join(", ")}.` : ""}`;
  const p = prompt + at.step - 1;
  byId("query").innerHTML = `The query stands at token ${p.toLocaleString("en")}: … ${inline(p - 14, p)}<b>${inline(
    p,
    p + 1,
  )}</b>${inline(p + 1, p + 6)} …`;
}

function mostLost(weights, mask, rows) {
  const found = [];
  for (let p = 0; p < prompt + at.step; p++) if (!mask[p] && weights[p] >= WEAK) found.push(p);
  return found.sort((a, b) => weights[b] - weights[a]).slice(0, rows);
}

function tellLosses(weights, masks) {
  const rows = mostLost(weights, masks[at.policy], 9).map(p => {
    const readers = policies.map((_, i) => (masks[i][p] ? swatch(i) : "")).join("");
    return (
      `<tr data-go data-token="${p}"><td class="n">${percent(weights[p])}</td><td class="n">${p.toLocaleString("en")}</td>` +
      `<td>${inline(p - 2, p)}<b>${inline(p, p + 1)}</b>${inline(p + 1, p + 3)}</td><td>${readers}</td></tr>`
    );
  });
  byId("losses").innerHTML =
    `<div class="head"><b>Tokens that lost the most</b><span class="note">under ${safe(policies[at.policy])}</span>
    </div>` +
    (rows.length
      ? `<table><thead><tr><th>lost</th><th>token</th><th>in its place</th><th>read by</th></tr></thead>
    <tbody>${rows.join("")}</tbody></table>`
      : "<p>None lost 0.05 % of the attention.</p>");
}

// ------------------------------------------------------------------ the text

const spans = [],
  looks = [];
function makeText() {
  const text = byId("text");
  tokens.forEach((token, p) => {
    const span = document.createElement("span");
    span.textContent = visible(token);
    span.dataset.token = p;
    spans.push(span);
    looks.push("");
    text.append(span);
  });
  const rules = [];
  for (let level = 1; level <= LEVELS; level++) {
    for (const kind of ["lost", "read"]) {
      rules.push(
        `.${kind}${level}{background-color:color-mix(in srgb,var(--${kind}) ${8 * level}%,transparent);color:var(--ink)}`,
      );
    }
  }
  for (let mask = 1; mask < 2 ** policies.length; mask++) {
    const held = policies.map((_, i) => i).filter(i => (mask >> i) & 1);
    const images = held.map(i => `linear-gradient(var(--p${i}),var(--p${i}))`).join(",");
    const places = held.map(i => `0 calc(100% - ${(policies.length - 1 - i) * 3}px)`).join(",");
    rules.push(`.m${mask}{background-image:${images};background-size:100% 2px;background-position:${places}}`);
  }
  document.head.append(Object.assign(document.createElement("style"), { textContent: rules.join("\n") }));
}

const levelOf = value => (value >= WEAK ? Math.ceil(LEVELS * Math.sqrt(Math.min(1, value / STRONG))) : 0);

function paintText(weights, masks) {
  const costs = at.colour === "effect" ? part(effects.nats, Float32Array) : null;
  const seen = prompt + at.step;
  for (let p = 0; p < spans.length; p++) {
    let held = 0;
    for (let i = 0; i < masks.length; i++) held |= masks[i][p] << i;
    const kept = masks[at.policy][p];
    const level = costs ? levelOf(Math.abs(costs[p]) / (effects.harm || 1)) : levelOf(weights[p]);
    const bad = costs ? costs[p] > 0 : !kept;
    let look = "t";
    if (p >= seen) look += " later";
    if (kept) look += " kept";
    if (level) look += ` ${bad ? "lost" : "read"}${level}`;
    if (held) look += ` m${held}`;
    if (p === seen - 1) look += " asks";
    if (p === at.token) look += " chosen";
    if (hit >= 0 && p >= hits[hit][0] && p < hits[hit][1]) look += " hit";
    if (looks[p] !== look) spans[p].className = looks[p] = look;
  }
}

/** What the query did with a token, for the mouse. */
function tellUnder(p) {
  const { weights, masks } = drawn,
    readers = policies.filter((_, i) => masks[i][p]).join(", ");
  const attended =
    p < prompt + at.step
      ? `${percent(weights[p])} of the attention; read by ${readers || "none"}`
      : "after the query";
  return `token ${p.toLocaleString("en")}: ${attended}${effects ? `; ${nats(p)}` : ""}`;
}

function nats(p) {
  const cost = part(effects.nats, Float32Array)[p];
  const does = `${cost < 0 ? "helps" : "costs"} the response ${Math.abs(cost).toPrecision(2)} nats`;
  return `under ${effects.policy} its loss ${does}`;
}

function scrollToToken(p) {
  const text = byId("text"),
    span = spans[p];
  if (span) text.scrollTop = span.offsetTop - text.clientHeight / 2;
}

function tellLegend() {
  const readers = policies.map((name, i) => `<span>${swatch(i)} read by ${safe(name)}</span>`).join("");
  const sample = (kind, words) => `<span><span class="t ${kind}">text</span> ${words}</span>`;
  const colours =
    at.colour === "effect"
      ? sample("lost6", `losing it costs the response (${safe(effects.policy)})`) + sample("read6", "losing it helps")
      : sample("read6", "attention that is read") +
        sample("lost6", `attention that ${safe(policies[at.policy])} loses`);
  const switches = effects
    ? ["attention", "effect"]
        .map(name => `<button data-colour="${name}" aria-pressed="${at.colour === name}">colour by ${name}</button>`)
        .join("")
    : "";
  byId("legend").innerHTML = switches + colours + readers;
}

// ------------------------------------------------------------------ what is shown

const dials = { layer: "row", head: "head", step: "step" };
const ends = { row: [0, layers.length - 1], head: [0, heads - 1], step: [1, steps] };

function move(changes) {
  Object.assign(at, changes);
  for (const [name, [low, high]] of Object.entries(ends)) at[name] = Math.min(high, Math.max(low, at[name]));
  at.policy = Math.min(policies.length - 1, Math.max(0, at.policy));
  at.budget = Math.min(budgets.length - 1, Math.max(0, at.budget));
  if (at.versus === at.policy) at.versus = at.policy ? 0 : 1;
  draw();
}

function draw() {
  const weights = weightsOf(at.row, at.head, at.step);
  const masks = policies.map((_, i) => run(i).mask(run(i).read, at.step, at.row, at.head));
  drawn = { weights, masks };
  paintText(weights, masks);
  tellControls();
  tellLegend();
  tellFinding(weights, masks);
  tellLosses(weights, masks);
  drawStrip(weights, masks);
  lossMaps();
  drawCurve();
  drawMatrix();
  tellToken();
  // Browsers take 20 ms to change an address.
  clearTimeout(naming);
  naming = setTimeout(nameView, 200);
}

function nameView() {
  if (location.protocol === "about:") return; // within a notebook
  history.replaceState(null, "", `#${address()}`);
}

function tellControls() {
  policies.forEach((_, i) => {
    const button = byId("policies").children[i];
    button.setAttribute("aria-checked", i === at.policy);
    button.querySelector("small").innerHTML = `<i>loses </i>${percent(run(i).lostAt(at.row, at.head, at.step))}`;
    const error = (run(i).error[query(at.row, at.head, at.step)] / 65535) * about.largestError;
    const recall = `recall of entries stored after the prompt ${percent(run(i).recall)}`;
    const mean = `over all layers, heads and steps ${percent(run(i).meanLost)} lost, ${recall}`;
    button.title = `output error here ${error.toFixed(2)}; ${mean}`;
  });
  for (const [name, key] of Object.entries(dials)) {
    byId(name).value = at[key];
    document.querySelector(`output[for=${name}]`).textContent = key === "row" ? layers[at.row] : at[key];
  }
  byId("budget").value = at.budget;
  byId("worst").textContent = `worst of ${policies[at.policy]}`;
  byId("play").textContent = playing ? "❚❚ stop" : "▶ play";
}

function address() {
  const { policy, versus, budget, row, head, step, token, colour } = at;
  const parts = {
    policy: policies[policy],
    versus: policies[versus],
    budget: budgets[budget],
    layer: layers[row],
    head,
    step,
  };
  if (token >= 0) parts.token = token;
  if (colour !== "attention") parts.colour = colour;
  return new URLSearchParams(parts).toString();
}

/** What an address asks for; what it does not name, or what this page lacks, stays as it is. */
function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1)),
    changes = {};
  const pick = (name, key, list) => {
    const place = list.findIndex(each => String(each) === asked.get(name));
    if (place >= 0) changes[key] = place;
  };
  pick("policy", "policy", policies);
  pick("versus", "versus", policies);
  pick("budget", "budget", budgets);
  pick("layer", "row", layers);
  for (const name of ["head", "step"])
    if (/^\d+$/.test(asked.get(name) || "")) changes[name] = Number(asked.get(name));
  const token = asked.get("token");
  changes.token = /^\d+$/.test(token || "") && Number(token) < length ? Number(token) : -1;
  changes.colour = effects && asked.get("colour") === "effect" ? "effect" : "attention";
  return changes;
}

function choose(token) {
  move({ token: token === at.token ? -1 : token });
  if (at.token >= 0) scrollToToken(at.token);
}

function toMostLost() {
  const it = run(),
    [most] = mostLost(weightsOf(at.row, at.head, at.step), it.mask(it.read, at.step, at.row, at.head), 1);
  scrollToToken(most ?? prompt + at.step - 1);
}

function toWorst() {
  move(largest(run().concentrated));
  toMostLost();
}

function toMostDifferent() {
  const other = run(at.versus).concentrated;
  move(largest(run().concentrated.map((value, i) => Math.abs(value - other[i]))));
  toMostLost();
}

function play() {
  clearInterval(playing);
  playing = playing ? null : setInterval(() => move({ step: (at.step % steps) + 1 }), 500);
  tellControls();
}

function search(forward = 0) {
  const wanted = byId("search").value.toLowerCase(),
    starts = [0];
  for (const token of tokens) starts.push(starts.at(-1) + token.length);
  const text = tokens.join("").toLowerCase(),
    tokenAt = place => starts.findIndex(start => start > place) - 1;
  const before = hit;
  hits = [];
  for (let i = wanted ? text.indexOf(wanted) : -1; i >= 0; i = text.indexOf(wanted, i + wanted.length)) {
    hits.push([tokenAt(i), tokenAt(i + wanted.length - 1) + 1]);
  }
  hit = hits.length ? (forward ? (before + forward + hits.length) % hits.length : 0) : -1;
  byId("found").textContent = wanted ? (hits.length ? `${hit + 1} of ${hits.length}` : "not found") : "";
  draw();
  if (hit >= 0) scrollToToken(hits[hit][0]);
}

/** Save a picture with its title above it and, below, what it is of. */
function save(name, form) {
  const svg = byId(name).querySelector("svg");
  const style = getComputedStyle(document.documentElement);
  const { width } = svg.viewBox.baseVal;
  const height = svg.viewBox.baseVal.height + 44;
  const place = `layer ${layers[at.row]}, head ${at.head}, step ${at.step}, budget ${budgets[at.budget]}`;
  const source =
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" ${FONT}>` +
    `<rect width="${width}" height="${height}" style="fill:var(--page)"/>` +
    `<text y="14" font-size="13" style="fill:var(--ink)">${byId(name).querySelector("b").innerHTML}</text>` +
    `<g transform="translate(0 24)">${svg.innerHTML}</g>` +
    `<text y="${height - 5}">${safe(`${policies[at.policy]}, ${place}; ${about.document}, ${about.model}`)}</text></svg>`;
  const drawing = source.replace(/var\((--[\w-]+)\)/g, (_, variable) => style.getPropertyValue(variable).trim());
  const file = `${about.document} ${name} ${place}`.replace(/[^\w.-]+/g, "_");
  if (form === "svg") return download(`${file}.svg`, new Blob([drawing], { type: "image/svg+xml" }));
  const image = new Image();
  image.onload = () => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob(blob => download(`${file}.png`, blob));
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawing)}`;
}

function download(name, blob) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function copyLink() {
  nameView();
  const area = Object.assign(document.createElement("textarea"), { value: location.href });
  // The clipboard's interface is not there in a page from a file.
  if (navigator.clipboard) await navigator.clipboard.writeText(location.href).catch(() => null);
  else {
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  byId("link").textContent = "copied";
  setTimeout(() => {
    byId("link").textContent = "copy link";
  }, 1500);
}

function toggleHelp() {
  byId("about-page").hidden = !byId("about-page").hidden;
  byId("help").setAttribute("aria-expanded", !byId("about-page").hidden);
  if (!byId("about-page").hidden) scrollTo({ top: 0 });
}

const keys = {
  ArrowLeft: () => move({ step: at.step - 1 }),
  ArrowRight: () => move({ step: at.step + 1 }),
  j: () => move({ row: at.row + 1 }),
  k: () => move({ row: at.row - 1 }),
  ",": () => move({ head: at.head - 1 }),
  ".": () => move({ head: at.head + 1 }),
  b: () => move({ budget: at.budget + 1 }),
  B: () => move({ budget: at.budget - 1 }),
  p: play,
  w: toWorst,
  x: toMostDifferent,
  "/": () => byId("search").focus(),
  "?": toggleHelp,
  Escape: () => move({ token: -1 }),
};

function listen() {
  for (const [name, key] of Object.entries(dials)) {
    [byId(name).min, byId(name).max] = ends[key];
    byId(name).addEventListener("input", event => move({ [key]: Number(event.target.value) }));
  }
  byId("budget").innerHTML = budgets
    .map((budget, i) => `<option value="${i}">${budget.toLocaleString("en")}</option>`)
    .join("");
  byId("policies").innerHTML = policies
    .map(
      (name, i) => `<button role="radio" data-policy="${i}">${swatch(i)}${safe(name)}
    <small></small></button>`,
    )
    .join("");
  const clicks = { play, worst: toWorst, differ: toMostDifferent, link: copyLink, help: toggleHelp };
  document.addEventListener("click", event => {
    const { target } = event,
      of = name => target.closest(`[data-${name}]`)?.dataset;
    if (clicks[target.id]) clicks[target.id]();
    else if (of("policy")) move({ policy: Number(of("policy").policy) });
    else if (of("save")) save(target.closest("figure").id, of("save").save);
    else if (of("colour")) move({ colour: of("colour").colour });
    else if (of("close")) move({ token: -1 });
    else if (of("row"))
      move({ row: Number(of("row").row), head: Number(of("row").head), step: Number(of("row").step) });
    else if (of("token")) choose(Number(of("token").token));
  });
  document.addEventListener("change", event => {
    if (event.target.id === "versus") move({ versus: Number(event.target.value) });
    if (event.target.id === "budget") move({ budget: Number(event.target.value) });
  });
  byId("text").addEventListener("pointermove", event => {
    const p = event.target.dataset.token;
    tip(event, event.pointerType === "mouse" && p ? tellUnder(Number(p)) : "");
  });
  byId("text").addEventListener("pointerleave", () => tip());
  byId("search").addEventListener("input", () => search());
  byId("search").addEventListener("keydown", event => {
    if (event.key === "Enter") search(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") event.target.blur();
  });
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
    const action = keys[event.key] || (policies[event.key - 1] && (() => move({ policy: event.key - 1 })));
    if (!action) return;
    event.preventDefault();
    action();
  });
  addEventListener("hashchange", () => {
    if (location.hash.slice(1) !== address()) move(fromAddress());
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's bars come and go
    width = innerWidth;
    widths.clear();
    draw();
  });
  new ResizeObserver(() =>
    document.documentElement.style.setProperty("--top", `${byId("top").offsetHeight}px`),
  ).observe(byId("top"));
}

async function begin() {
  await unpack();
  const { policy, budget, layer, head, step } = about.start;
  Object.assign(at, {
    policy: policies.indexOf(policy),
    budget: budgets.indexOf(budget),
    row: layers.indexOf(layer),
    head,
    step,
  });
  byId("what").textContent = `${about.document} on ${about.model}`;
  byId("signature").textContent = about.signature;
  byId("limits").textContent =
    `Attention is rounded to 1/255 on a root scale; below ${percent(about.floor)} on a token it is not ` +
    `drawn. Losses are exact to 0.01 points.${
      about.allSteps > steps ? ` The page holds the first ${steps} of ${about.allSteps} ` + "steps." : ""
    }`;
  makeText();
  listen();
  move(fromAddress());
  if (at.token >= 0) scrollToToken(at.token);
  else toMostLost();
  document.body.dataset.ready = "yes";
}

begin().catch(error => {
  byId("finding").textContent = `This browser cannot show the page (${error.message}): take one of 2023 or later.`;
  throw error;
});
