"use strict";
const byId = id => document.getElementById(id);
const element = (tag, text, kind) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
};
const unpack = code => Uint8Array.from(atob(code), c => c.charCodeAt(0));
const heat = share => `rgba(var(--heat), ${(0.75 * Math.min(1, Math.max(0, share))).toFixed(3)})`;
const weights = unpack(data.rows.bytes);
for (const text of data.texts) text.keys = unpack(text.keys);
let token = null;

const layer = () => +byId("which-layer").value, head = () => +byId("which-head").value;
const fill = (select, count) => {
  for (let i = 0; i < count; i++) select.append(new Option(i, i));
};

// One row of attention: the weights are stored as square roots, one byte each.
function attentionRow(query) {
  const n = data.rows.n, start = ((layer() * data.heads + head()) * n + query) * n;
  return Array.from(weights.subarray(start, start + n), b => (b / 255) ** 2);
}

// The map of heads, one row per layer.
function showHeads() {
  const home = byId("heads"), columns = data.heads;
  home.style.gridTemplateColumns = `auto repeat(${columns}, auto)`;
  const cells = [];
  for (const cell of data.map) {
    if (cell.head === 0) cells.push(element("span", `layer ${cell.layer}`));
    const button = element("button", cell.b === null ? "–" : cell.b.toFixed(2).replace("0.", "."));
    button.type = "button";
    button.style.background = heat((Math.log2(cell.sd || 0.5) + 1) / 4);  // from 0.5 to 8
    button.title = `layer ${cell.layer}, head ${cell.head}: exponent b ${cell.b?.toFixed(2) ?? "not known"}, ` +
      `standard deviation of logits ${cell.sd?.toFixed(2)}`;
    if (cell.layer === layer() && cell.head === head()) button.classList.add("chosen");
    button.addEventListener("click", () => {
      byId("which-layer").value = cell.layer;
      byId("which-head").value = cell.head;
      show();
    });
    cells.push(button);
  }
  home.replaceChildren(...cells);
}

function showText() {
  const index = +byId("which-text").value, text = data.texts[index], n = text.words.length;
  const received = text.received[layer()], start = (layer() * data.heads + head()) * n;
  const sinks = received.map((_, i) => i).sort((a, b) => received[b] - received[a]).slice(0, 5);
  byId("text").replaceChildren(...text.words.map(([word, joined], i) => {
    const button = element("button", word, joined ? "joined" : "");
    const share = text.keys[start + i] / 255, keys = Math.exp(share * Math.max(1, Math.log(data.longest)));
    button.type = "button";
    button.hidden = word === "";
    button.style.background = heat(1 - share);
    button.title = `attends to ${keys.toFixed(1)} tokens, receives ${received[i]} times its share`;
    if (sinks.includes(i)) button.classList.add("sink");
    if (index === 0 && i === token) button.classList.add("chosen");
    button.disabled = index !== 0 || i >= data.rows.n;
    button.addEventListener("click", () => { token = i; show(); });
    return button;
  }));
}

function showRow() {
  const words = data.texts[0].words, title = byId("row-title");
  if (token === null || byId("which-text").value !== "0") {
    title.textContent = byId("which-text").value === "0" ? "Click a token to see where it attends." : "";
    byId("bars").replaceChildren();
    return;
  }
  const row = attentionRow(token), order = row.map((_, j) => j).sort((a, b) => row[b] - row[a]).slice(0, 12);
  title.textContent = `Where "${words[token][0]}" (position ${token}) attends in layer ${layer()}, head ${head()}:`;
  byId("bars").replaceChildren(...order.map(j => {
    const line = element("div"), bar = element("i");
    bar.style.width = `${100 * row[j] / Math.max(row[order[0]], 1e-9)}%`;
    bar.title = row[j].toFixed(3);
    line.append(element("span", `${words[j][0]} (${j})`), bar);
    return line;
  }));
}

function show() { showHeads(); showText(); showRow(); }

fill(byId("which-text"), data.texts.length);
fill(byId("which-layer"), data.layers);
fill(byId("which-head"), data.heads);
for (const id of ["which-text", "which-layer", "which-head"]) byId(id).addEventListener("change", show);
show();
