// A finished simulation: all betas side by side at one time, which a slider or the play button moves.
"use strict";
const at = id => document.getElementById(id);
const shown = v => v === null || v === undefined ? "" : +(+v).toPrecision(3);
const made = (tag, words, more = {}) => Object.assign(document.createElement(tag), {textContent: words, ...more});
const view = new View(), end = data.runs[0].w2.t[data.runs[0].w2.t.length - 1];
let playing = false, now = 0, last = 0;

// The cloud of a run at time t: the last kept one, or between two of them along the chord.
function cloudAt(run, t) {
  const times = run.clouds.t;
  let i = times.findIndex(s => s > t) - 1;
  if (i < 0) i = t <= times[0] ? 0 : times.length - 1;
  const j = Math.min(i + 1, times.length - 1), share = j > i ? (t - times[i]) / (times[j] - times[i]) : 0;
  const n = run.clouds.x[0].length, cloud = cloudOf(n);
  for (let k = 0; k < n; k++) {
    const x = [0, 1, 2].map(c => (1 - share) * (run.clouds.x[i][k][c] ?? 0) + share * (run.clouds.x[j][k][c] ?? 0));
    const r = norm(x) || 1;
    for (let c = 0; c < 3; c++) cloud.x[c][k] = x[c] / r;
  }
  return cloud;
}

const PHASES = {  // a phase -> its word and its shade
  concentrating: ["falls", "falling"], metastable: ["rests", "resting"], terminal: ["leaves", "leaving"], spreading: ["spreads", "leaving"],
};
const spansOf = run => run.phases.map(p => ({from: p.start, to: p.end, name: PHASES[p.name][0], tone: PHASES[p.name][1]}));
const highest = Math.max(...data.runs.flatMap(run => run.w2.y)) * 1.1;

function build() {
  for (const name of ["lead", "sentences", "about"]) at(name).textContent = data[name];
  for (const run of data.runs) {
    const card = document.createElement("section");
    card.append(made("h2", run.name));
    if (run.clouds) {
      run.cloudCanvas = document.createElement("canvas");
      run.cloudCanvas.className = "cloud";
      run.cloudCanvas.setAttribute("aria-label", `tokens, ${run.name}`);
      view.attach(run.cloudCanvas);
      run.colours = hues(run.clouds.x[0]);
      card.append(run.cloudCanvas);
    }
    run.curveCanvas = document.createElement("canvas");
    run.curveCanvas.className = "curve";
    run.curveCanvas.setAttribute("aria-label", `distance over time, ${run.name}`);
    run.curveCanvas.addEventListener("click", e => move((e.offsetX - 42) / (run.curveCanvas.clientWidth - 52) * end));
    card.append(run.curveCanvas);
    at("runs").append(card);
  }
  const head = document.createElement("tr");
  head.append(...data.columns.map(name => made("th", name)));
  at("table").append(head, ...data.rows.map(row => {
    const line = document.createElement("tr");
    line.append(...row.map((v, k) => {
      const cell = made("td", typeof v === "number" ? shown(v) : v ?? "");
      cell.dataset.name = data.columns[k];  // the heading, where a narrow page shows a row as a list
      return cell;
    }));
    return line;
  }));
  at("remarks").append(...data.remarks.map(words => made("li", words)));
  at("time").max = end;
  at("time").addEventListener("input", e => { playing = false; move(+e.target.value); });
  at("run").addEventListener("click", () => { playing = !playing; if (now >= end) now = 0; move(now); });
  at("numbers").addEventListener("click", () => {
    const link = made("a", "", {href: URL.createObjectURL(new Blob([JSON.stringify(data)], {type: "application/json"})), download: "simulation.json"});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  view.watchers.push(draw);
  window.addEventListener("resize", draw);
}

function move(t) {
  now = Math.max(0, Math.min(end, t));
  at("time").value = now;
  at("now").textContent = now.toFixed(2);
  at("run").textContent = playing ? "Pause" : "Play";
  draw();
}

function draw() {
  for (const run of data.runs) {
    if (run.clouds) drawCloud(run.cloudCanvas, view, data.d, cloudAt(run, now), run.colours, data.basis);
    const marks = run.t_min_predicted === null ? [] : [{t: run.t_min_predicted, name: "predicted t_min"}];
    const curve = {t: run.w2.t, y: run.w2.y, stroke: colour("accent"), name: data.curve};
    drawCurves(run.curveCanvas, {curves: [curve], end, top: highest, spans: spansOf(run), marks, cursor: now});
  }
}

function frame(time) {
  if (playing) {
    move(now + Math.min(time - last, 100) / 12000 * end);  // the whole run in twelve seconds
    if (now >= end) { playing = false; move(end); }
  }
  last = time;
  requestAnimationFrame(frame);
}

build();
move(0);
requestAnimationFrame(frame);
