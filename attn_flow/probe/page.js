"use strict";
const at = id => document.getElementById(id);
const make = (tag, words, kind) => {
  const node = document.createElement(tag);
  if (words !== undefined) node.textContent = words;
  if (kind) node.className = kind;
  return node;
};
const unpack = code => code ? Uint8Array.from(atob(code), c => c.charCodeAt(0)) : null;
const weights = {n: data.rows.n, true: unpack(data.rows.true), closure: unpack(data.rows.closure)};
let chosen = null;

function options(select, names, start) {
  names.forEach((name, i) => { const o = make("option", name); o.value = i; select.append(o); });
  select.value = start;
}

// One row of attention: m weights of a head, each the square of a byte.
function attentionRow(which, layer, head, query) {
  if (!weights[which]) return null;
  const m = weights.n, start = ((layer * data.heads + head) * m + query) * m;
  return Array.from(weights[which].subarray(start, start + m), b => (b / 255) ** 2);
}

function colour(missed) {  // nothing at 0, red at 1 and beyond, on a light page and on a dark one
  return `rgba(var(--missed), ${(.75 * Math.min(1, Math.sqrt(Math.max(0, missed)))).toFixed(3)})`;
}

function showText() {
  const text = data.texts[at("which-text").value], layer = +at("which-layer").value, home = at("text");
  home.replaceChildren();
  const received = text.received[layer];
  const order = received.map((v, i) => i).sort((a, b) => received[b] - received[a]).slice(0, data.sinks);
  const first = at("which-text").value === "0";
  text.tokens.forEach((token, i) => {
    const b = make("button", token);
    b.type = "button";
    b.style.background = colour(text.missed[layer][i]);
    b.title = `missed ${text.missed[layer][i]}, receives ${received[i]} times its share`;
    if (order.includes(i)) b.classList.add("sink");
    if (first && i === chosen) b.classList.add("chosen");
    b.disabled = !(first && i < weights.n);
    b.addEventListener("click", () => { chosen = i; showText(); showRow(); });
    home.append(b, " ");
  });
  at("sinks").textContent = "Sinks of this layer (underlined; attention received over a fair share): " +
    order.map(i => `${text.tokens[i]} at ${i}: ${received[i].toFixed(1)}`).join(", ") + ".";
}

function showRow() {
  if (chosen === null) return;
  const layer = +at("which-layer").value, head = +at("which-head").value, tokens = data.texts[0].tokens;
  const row = attentionRow("true", layer, head, chosen), said = attentionRow("closure", layer, head, chosen);
  const title = at("row-title");
  title.textContent = `Where "${tokens[chosen]}" (place ${chosen}) attends in layer ${layer}, head ${head} ` +
    `(closure explains ${data.explained[layer][head]} of this head):`;
  title.append(make("span", "", "key true"), "attention");
  if (said) title.append(make("span", "", "key predicted"), "closure");
  const size = j => Math.max(row[j], said ? said[j] : 0);
  const top = row.map((v, j) => j).sort((a, b) => size(b) - size(a)).slice(0, 12);
  const most = Math.max(...top.map(size), 1e-9);
  at("bars").replaceChildren(...top.map(j => {
    const line = make("div", undefined, "bar"), track = make("div", undefined, "track");
    line.append(make("span", `${tokens[j]} (${j})`, "name"), track);
    for (const [values, kind] of [[row, "true"], [said, "predicted"]]) {
      if (!values) continue;
      const bar = make("div", undefined, kind);
      bar.style.width = `${100 * values[j] / most}%`;
      bar.title = values[j].toFixed(3);
      track.append(bar);
    }
    return line;
  }));
}

// The table: one line a quantity, one column a layer.
const lines = new Map();
let columns = 0, sorting = {column: -1, up: false};
for (const row of data.table) {
  const key = `${row.group}\n${row.quantity}`;
  if (!lines.has(key)) lines.set(key, {group: row.group, quantity: row.quantity, cells: []});
  lines.get(key).cells[row.layer] = row;
  columns = Math.max(columns, row.layer + 1);
}

function showTable() {
  const group = at("group").value, words = at("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = [...lines.values()].filter(line => (group === "all" || line.group === group) &&
    words.every(w => `${line.group} ${line.quantity}`.toLowerCase().includes(w)));
  if (sorting.column >= 0) {
    const value = line => sorting.column === 0 ? line.group : sorting.column === 1 ? line.quantity :
      (line.cells[sorting.column - 2] || {}).mean ?? -Infinity;
    shown.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (sorting.up ? 1 : -1));
  }
  const head = make("tr");
  ["group", "what", ...Array(columns).keys()].forEach((name, i) => {
    const th = make("th", i > 1 ? `layer ${name}` : name);
    th.addEventListener("click", () => {
      sorting = {column: i, up: sorting.column === i ? !sorting.up : i < 2};
      showTable();
    });
    head.append(th);
  });
  at("table").replaceChildren(head, ...shown.map(line => {
    const tr = make("tr");
    tr.append(make("td", line.group), make("td", line.quantity));
    for (let i = 0; i < columns; i++) {
      const cell = line.cells[i], td = make("td", cell ? cell.mean : "");
      if (cell && typeof cell.low === "number") td.append(make("small", `${cell.low} to ${cell.high}`));
      tr.append(td);
    }
    return tr;
  }));
}

// The heads that the closure explains worst and best; a click looks at one.
function showHeads() {
  const all = data.explained.flatMap((row, layer) => row.map((value, head) => ({layer, head, value})));
  all.sort((a, b) => a.value - b.value);
  const few = Math.min(data.named, all.length >> 1), home = at("heads");
  for (const [words, heads] of [["Worst heads: ", all.slice(0, few)], ["Best heads: ", all.slice(all.length - few).reverse()]]) {
    const line = make("div", words);
    home.append(line);
    for (const {layer, head, value} of heads) {
      const b = make("button", `layer ${layer}, head ${head}: ${value.toFixed(2)}`);
      b.type = "button";
      b.addEventListener("click", () => {
        at("which-layer").value = layer;
        at("which-head").value = head;
        if (chosen === null) chosen = 0;
        at("which-text").value = 0;
        showText();
        showRow();
      });
      line.append(b, " ");
    }
  }
}

// The cloud in the page's own colours, also when a reader turns the light off.
const dark = matchMedia("(prefers-color-scheme: dark)");
function lit() {
  const page = getComputedStyle(document.documentElement), value = name => page.getPropertyValue(name).trim();
  const look = {paper_bgcolor: value("--back"), "font.color": value("--text"), "sliders[0].bgcolor": value("--note"),
    "sliders[0].activebgcolor": value("--line"), "updatemenus[0].bgcolor": value("--note")};
  for (const axis of ["xaxis", "yaxis", "zaxis"])
    Object.assign(look, {[`scene.${axis}.backgroundcolor`]: value("--note"), [`scene.${axis}.gridcolor`]: value("--line"),
      [`scene.${axis}.zerolinecolor`]: value("--line"), [`scene.${axis}.showbackground`]: true});
  return look;
}

options(at("which-text"), data.texts.map((_, i) => i), 0);
options(at("which-layer"), Array.from({length: data.layers}, (_, i) => i), 0);
options(at("which-head"), Array.from({length: data.heads}, (_, i) => i), 0);
at("which-text").addEventListener("change", showText);
at("which-layer").addEventListener("change", () => { showText(); showRow(); });
at("which-head").addEventListener("change", showRow);
["all", ...new Set([...lines.values()].map(line => line.group))].forEach(name => {
  const o = make("option", name); o.value = name; at("group").append(o);
});
at("group").addEventListener("change", showTable);
at("search").addEventListener("input", showTable);
showText();
showHeads();
showTable();
Plotly.newPlot("cloud", scene.data, scene.layout, {responsive: true})
  .then(() => Plotly.addFrames("cloud", scene.frames))
  .then(() => Plotly.relayout("cloud", lit()));
dark.addEventListener("change", () => Plotly.relayout("cloud", lit()));
