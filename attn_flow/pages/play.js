// The playground: settings, controls, the running flow and what was predicted of it.
"use strict";
const PRESETS = {
  "gather and leave": {d: 2, G: "3,0;0,1", V: "1,0;0,2", beta: 100, h: 0.04, law: "even"},
  "the same on the sphere": {d: 3, G: "3,0,0;0,1,0;0,0,1", V: "1,0,0;0,2,0;0,0,1", beta: 30, h: 0.05, law: "even"},
  "an oblique projection": {d: 2, G: "2,.5;0,1", V: "1,0;0,1", beta: 50, h: 0.04},
  "onto a great circle": {d: 3, G: "1,0,0;0,1,0;0,0,1", V: "2,0,0;0,2,0;0,0,.5", beta: 40, h: 0.04},
  "a limit that rotates": {d: 3, G: "1,0,0;0,1,0;0,0,1", V: "1,-1,0;1,1,0;0,0,-.5", beta: 60, h: 0.04},
  "a Jordan block: slow": {d: 2, G: "1,1;0,1", V: "1,0;0,1", beta: 200, h: 0.05, law: "even"},
  "a layer that stays": {d: 2, G: "1,0;0,2", V: "-1,0;0,-3", beta: 300, h: 0.01},
  "metastable clusters": {d: 2, G: "1,0;0,1", V: "1,0;0,1", beta: 16, h: 0.1},
  "synchronise (unnormalised)": {d: 3, G: "1,0,0;0,1,0;0,0,1", V: "1,0,0;0,1,0;0,0,1", beta: 1, h: 0.03, kind: "unnormalised"},
  "hardmax: every token looks at one": {d: 3, G: "3,0,0;0,1,0;0,0,1", V: "1,0,0;0,2,0;0,0,1", beta: 30, h: 0.05, kind: "hardmax"},
};
const DEFAULTS = {n: 500, kind: "softmax", step: "rk4", law: "uniform", noise: 0, seed: 1, speed: 1};
const CHOICES = {kind: ["softmax", "unnormalised", "hardmax"], step: ["rk4", "euler"], law: ["uniform", "tilted", "even"], d: ["2", "3"]};
const RANGES = {n: [2, 1500], beta: [0.01, 1e6], h: [1e-5, 1], noise: [0, 3], seed: [0, 4294967295], speed: [1, 20]};
const SLIDERS = {  // position of a slider -> value, and back
  beta: [p => 10 ** p, Math.log10], h: [p => 10 ** p, Math.log10], n: [p => Math.round(10 ** p), Math.log10],
  noise: [p => p, v => v], speed: [p => p, v => v],
};
const at = id => document.getElementById(id);
const shown = v => +(+v).toPrecision(3);
const view = new View();
const BUTTONS = ["gather and leave", "onto a great circle", "metastable clusters"];
let settings, attention, cloud, initial, found, against, random, history, t, running = true, tooFast, frames = 0, since = 0;

const parseMatrix = (text, d) => {
  const rows = text.split(";").map(row => row.split(",").map(Number));
  return rows.length === d && rows.every(row => row.length === d && row.every(Number.isFinite)) ? rows : null;
};

const identity = d => unit(d).slice(0, d).map(row => row.slice(0, d)).join(";");

// Settings from a link's text; what it lacks or spells wrongly is the first preset's or the default.
function parsed(text) {
  const asked = Object.fromEntries(new URLSearchParams(text)), made = {...DEFAULTS, ...Object.values(PRESETS)[0]};
  if (CHOICES.d.includes(asked.d) && +asked.d !== made.d) {
    made.d = +asked.d;
    made.G = made.V = identity(made.d);
  }
  for (const name of ["G", "V"]) if (asked[name] && parseMatrix(asked[name], made.d)) made[name] = asked[name];
  for (const name of ["kind", "step", "law"]) if (CHOICES[name].includes(asked[name])) made[name] = asked[name];
  for (const [name, [low, high]] of Object.entries(RANGES)) {
    const value = Number(asked[name]);
    if (asked[name] && value >= low && value <= high) made[name] = ["n", "seed", "speed"].includes(name) ? Math.round(value) : value;
  }
  return made;
}
const link = () => new URLSearchParams(Object.entries(settings).map(([k, v]) => [k, String(v)])).toString();

function adopt(changes) {
  settings = {...settings, ...changes};
  attention = {G: padded(parseMatrix(settings.G, settings.d)), V: padded(parseMatrix(settings.V, settings.d)),
               beta: settings.beta, kind: settings.kind};
  found = settings.kind === "unnormalised"
    ? {case: "undefined", why: "the limit map is derived for softmax attention"} : predict(attention, settings.d);
  const goesOn = "speed beta h noise step kind G V".split(" ");  // from the tokens as they are
  if (!initial || Object.keys(changes).some(name => !goesOn.includes(name))) restart();
  else if (["G", "V", "kind", "beta"].some(name => name in changes)) compare();
  controls();
  window.history.replaceState(null, "", `#${link()}`);
}

function restart() {
  initial = start(settings.n, settings.d, settings.law, settings.seed);
  cloud = initial;
  random = generator(settings.seed + 1);
  t = 0;
  compare();
}

// A prediction is of the law one starts from: changed weights or temperature take the present cloud as the start.
function compare() {
  initial = cloud;
  t = 0;
  tooFast = false;
  against = comparison(found, initial);
  history = {t: [], distance: [], order: []};
  note();
}

function note() {
  if (history.t.length > 2000) for (const name of Object.keys(history)) history[name] = history[name].filter((_, i) => i % 2 === 0);
  const mean = cloud.x.map(u => u.reduce((a, b) => a + b, 0) / cloud.n);
  history.t.push(t);
  history.distance.push(against ? against.measure(cloud) : 0);
  history.order.push(norm(mean));
}

function advance() {
  const moved = step(attention, cloud, settings.h, settings.step);
  tooFast = tooFast || !(moved.turn <= 0.5);
  if (!Number.isFinite(moved.turn)) { running = false; controls(); return; }  // e^{beta |G|} overflowed
  cloud = settings.noise > 0 ? kicked(moved.cloud, settings.h, settings.noise, settings.d, random) : moved.cloud;
  t += settings.h;
  note();
}

const tokens = cloud => Array.from({length: cloud.n}, (_, i) => token(cloud, i));
function colours() {
  if (!against) return hues(tokens(initial));
  if (against.side) return against.side.map(up => colour(up ? "plus" : "minus"));
  return hues(tokens(against.limits || initial));
}

function draw() {
  drawCloud(at("cloud"), view, settings.d, cloud, colours(), found.basis || []);
  const {tMin, tExit} = predictedMoments(), end = Math.max(10, t * 1.05, tMin ? tMin * 1.5 : 0);
  const spans = tMin ? [{from: 0, to: tMin, name: "falls", tone: "falling"}] : [];
  if (tExit > tMin) spans.push({from: tMin, to: tExit, name: "rests", tone: "resting"});
  if (tMin) spans.push({from: tExit, to: Infinity, name: "leaves", tone: "leaving"});
  const curves = [{t: history.t, y: history.order, stroke: colour("faint"), name: "|mean token|"}];
  if (against) curves.unshift({t: history.t, y: history.distance, stroke: colour("accent"), name: against.name});
  drawCurves(at("curve"), {curves, end, spans, marks: tMin ? [{t: tMin, name: "predicted t_min"}] : []});
  const now = against ? `, ${against.name} ${history.distance[history.distance.length - 1].toFixed(4)}` : "";
  at("now").textContent = `t = ${t.toFixed(2)}${now}`;
  at("warning").hidden = !tooFast;
}

const predictedMoments = () => settings.kind === "softmax" && settings.noise === 0 ? moments(found, settings.beta) : {};

// One line under each picture: what the marks and colours are, and what is predicted over time.
function told() {
  const {tMin, tExit} = predictedMoments(), words = [], over = [];
  const set = found.k === 1 ? "the two red points" : "the red great circle";
  const limits = {
    undefined: `No limit is predicted: ${found.why}.`,
    stationary: "At zero temperature nothing moves; at finite β clusters form and merge, ever more slowly.",
    fixed: `At low temperature tokens gather at ${set}.`,
    rotating: `Tokens gather on ${found.k === 2 && settings.d === 3 ? "the red great circle" : "E"} and turn in it (frequency ${shown(found.frequency ?? 0)}).`,
    jordan: "Tokens gather at the two red points, slowly, like a power of t (a Jordan block).",
  };
  words.push(limits[found.case]);
  if (against && against.side) words[0] = words[0].replace(/\.$/, `; ${shown(100 * against.up / cloud.n)}% are blue.`);
  else words.push(against && against.limits ? "Colour: where a token should go." : "Colour: where a token started.");
  if (tMin) over.push(`Nearest at about t = ${shown(tMin)}, then V pulls the clusters away at rate ${shown(found.exit)}.`);
  else if (found.case === "fixed" && found.exit === 0) over.push("The clusters stay: W2 has no least value to predict.");
  else if (found.case === "fixed" && found.exitUnknown) over.push(`When clusters leave is not predicted: ${found.exitUnknown}.`);
  if (tMin && settings.law !== "even") over.push("Random tokens leave earlier, by chance.");
  if (settings.kind === "hardmax") over.push("Hardmax of few tokens is not this limit: a token that is its own best match stops.");
  if (settings.noise > 0) over.push("Predictions are for the flow without noise.");
  return [words.join(" "), over.join(" ")];
}

// The time after which the picture starts again: past the predicted exit, or a while.
function lastTime() {
  const {tMin, tExit} = predictedMoments();
  return tMin ? 1.3 * Math.max(tMin, tExit || 0) + 6 : 25;
}

function controls() {
  for (const name of ["kind", "step", "law", "d"]) at(name).value = settings[name];
  for (const [name, [, position]] of Object.entries(SLIDERS)) {
    at(name).value = position(settings[name]);
    at(`${name}-shown`).textContent = name === "beta" && settings.kind === "hardmax" ? "∞" : shown(settings[name]);
  }
  at("seed").value = settings.seed;
  for (const name of ["G", "V"]) {
    const entries = parseMatrix(settings[name], settings.d), place = at(name);
    place.style.gridTemplateColumns = `repeat(${settings.d}, 1fr)`;
    if (place.children.length !== settings.d ** 2) {
      place.replaceChildren(...entries.flat().map((_, k) => {
        const box = Object.assign(document.createElement("input"), {type: "number", step: "any"});
        box.setAttribute("aria-label", `${name}, row ${Math.floor(k / settings.d) + 1}, column ${k % settings.d + 1}`);
        box.addEventListener("input", () => rewritten(name));
        return box;
      }));
    }
    entries.flat().forEach((v, k) => { if (document.activeElement !== place.children[k]) place.children[k].value = v; });
  }
  const same = Object.entries(PRESETS).find(([, p]) => Object.entries({...DEFAULTS, ...p})
    .every(([k, v]) => ["n", "seed", "speed"].includes(k) || String(settings[k]) === String(v)));
  at("preset").value = same ? same[0] : "";
  [at("told").textContent, at("story").textContent] = told();
  for (const button of at("buttons").children) button.classList.toggle("chosen", same && same[0] === button.textContent);
  at("run").textContent = running ? "Pause" : "Run";
}

function rewritten(name) {
  const boxes = Array.from(at(name).children), d = settings.d;
  const text = Array.from({length: d}, (_, i) => boxes.slice(i * d, i * d + d).map(b => b.value.trim() || "x").join(",")).join(";");
  const good = parseMatrix(text, d);
  boxes.forEach(box => box.classList.toggle("bad", box.value.trim() === ""));
  if (good) adopt({[name]: text});
}

function choose(name) {
  initial = null;
  running = true;
  adopt({...DEFAULTS, n: settings.n, seed: settings.seed, ...PRESETS[name]});
}

function connect() {
  at("buttons").append(...BUTTONS.map(name => {
    const button = Object.assign(document.createElement("button"), {textContent: name});
    button.addEventListener("click", () => choose(name));
    return button;
  }));
  at("preset").append(new Option("your own", ""), ...Object.keys(PRESETS).map(name => new Option(name, name)));
  at("preset").addEventListener("change", e => { if (e.target.value) choose(e.target.value); });
  for (const [name, [value]] of Object.entries(SLIDERS)) {
    at(name).addEventListener("input", e => adopt({[name]: +value(+e.target.value).toPrecision(3)}));
  }
  for (const name of ["kind", "step", "law"]) at(name).addEventListener("change", e => adopt({[name]: e.target.value}));
  at("d").addEventListener("change", e => adopt({d: +e.target.value, G: identity(+e.target.value), V: identity(+e.target.value)}));
  at("seed").addEventListener("change", e => {
    const seed = Number(e.target.value);
    if (Number.isInteger(seed) && seed >= 0 && seed <= RANGES.seed[1]) adopt({seed}); else controls();
  });
  at("run").addEventListener("click", () => { running = !running; controls(); });
  at("once").addEventListener("click", () => { running = false; advance(); controls(); draw(); });
  at("again").addEventListener("click", () => { restart(); draw(); });
  at("link").addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(location.href); at("link").textContent = "Copied"; }
    catch { window.prompt("The link to these settings:", location.href); }
    setTimeout(() => { at("link").textContent = "Copy link"; }, 1500);
  });
  view.attach(at("cloud"));
  view.watchers.push(draw);
  window.addEventListener("resize", draw);
  window.addEventListener("hashchange", () => { initial = null; adopt(parsed(location.hash.slice(1))); });
}

function frame(now) {
  if (running) {
    if (at("repeat").checked && t > lastTime()) restart();
    const begun = performance.now();
    for (let k = 0; k < settings.speed && (k === 0 || performance.now() - begun < 25); k++) advance();
    draw();
    frames += 1;
    if (now - since > 1000) { at("fps").textContent = `${Math.round(frames * 1000 / (now - since))} frames/s`; frames = 0; since = now; }
  }
  requestAnimationFrame(frame);
}

connect();
adopt(parsed(location.hash.slice(1)));
draw();
requestAnimationFrame(frame);
