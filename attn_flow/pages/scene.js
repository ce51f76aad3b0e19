// Pictures of clouds on the circle or the sphere, and curves over time, on canvases that follow the page's theme.
"use strict";
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Tokens' colours by their places around the third axis; brighter on a dark page.
function hues(tokens) {
  const light = colour("light");
  return tokens.map(([x, y]) => `hsl(${Math.atan2(y, x) * 180 / Math.PI} 65% ${light})`);
}

// A canvas with as many pixels as the screen has: draw(context, width, height) in CSS pixels.
function paint(canvas, draw) {
  const {clientWidth: w, clientHeight: h} = canvas, ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(h * ratio)) {
    canvas.width = Math.round(w * ratio);
    canvas.height = Math.round(h * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, w, h);
  draw(context, w, h);
}

// How the sphere is turned: dragged on one canvas, shared by all that are given the same view.
class View {
  constructor() { this.across = -0.6; this.up = 0.35; this.watchers = []; }

  attach(canvas) {
    let from = null;
    canvas.addEventListener("pointerdown", e => { from = [e.clientX, e.clientY]; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointermove", e => {
      if (!from) return;
      this.across += (e.clientX - from[0]) * 0.01;
      this.up = Math.max(-1.57, Math.min(1.57, this.up + (e.clientY - from[1]) * 0.01));
      from = [e.clientX, e.clientY];
      this.watchers.forEach(watch => watch());
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { from = null; });
  }

  // Right, up and towards the reader, of a point (x, y, z); the circle is seen from above.
  see(x, y, z, d) {
    if (d === 2) return [x, y, 1];
    const c = Math.cos(this.across), s = Math.sin(this.across), p = Math.cos(this.up), q = Math.sin(this.up);
    const right = c * x - s * y, away = s * x + c * y;
    return [right, p * z + q * away, q * z - p * away];
  }
}

// The cloud {n, x}, colours[i] of each token, and the set S cap E: two points for one basis vector, a circle for two.
function drawCloud(canvas, view, d, cloud, colours, basis) {
  paint(canvas, (c, w, h) => {
    const r = Math.min(w, h) / 2 / 1.16 - 4, place = (x, y, z) => {
      const [right, up, near] = view.see(x, y, z, d);
      return [w / 2 + r * right, h / 2 - r * up, near];
    };
    c.strokeStyle = colour("line"); c.lineWidth = 1;
    c.beginPath(); c.arc(w / 2, h / 2, r, 0, 2 * Math.PI); c.stroke();
    c.fillStyle = colour("faint"); c.font = "12px system-ui, sans-serif"; c.textAlign = "center";
    ["e₁", "e₂", "e₃"].slice(0, d).forEach((name, k) => {
      const [px, py, near] = place(...[0, 1, 2].map(j => (j === k ? 1.09 : 0)));
      c.globalAlpha = near < 0 ? 0.4 : 1;
      c.fillText(name, px, py + 4);
    });
    c.globalAlpha = 1;
    c.strokeStyle = c.fillStyle = colour("target"); c.lineWidth = 2;
    if (basis.length === 2 && d === 3) {
      for (let j = 0; j < 120; j++) {  // half of the great circle is behind the sphere
        const at = s => { const a = Math.cos(s), b = Math.sin(s); return basis[0].map((v, k) => a * v + b * basis[1][k]); };
        const p = place(...at(j / 120 * 2 * Math.PI)), q = place(...at((j + 1) / 120 * 2 * Math.PI));
        c.globalAlpha = p[2] < 0 ? 0.25 : 1;
        c.beginPath(); c.moveTo(p[0], p[1]); c.lineTo(q[0], q[1]); c.stroke();
      }
    }
    const order = Array.from({length: cloud.n}, (_, i) => [i, ...place(cloud.x[0][i], cloud.x[1][i], cloud.x[2][i])]);
    if (d === 3) order.sort((a, b) => a[3] - b[3]);
    for (const [i, px, py, near] of order) {
      c.globalAlpha = d === 2 ? 0.55 : near < 0 ? 0.22 : 0.8;
      c.fillStyle = colours[i];
      c.beginPath(); c.arc(px, py, d === 3 && near < 0 ? 2.2 : 3.2, 0, 2 * Math.PI); c.fill();
    }
    c.globalAlpha = 1;
    if (basis.length === 1) for (const sign of [1, -1]) {
      const [px, py, near] = place(...basis[0].map(v => sign * v));
      c.globalAlpha = near < 0 ? 0.4 : 1;
      c.beginPath(); c.arc(px, py, 9, 0, 2 * Math.PI); c.stroke();
    }
    c.globalAlpha = 1;
  });
}

const niceStep = (range, most) => {
  const raw = range / most, ten = 10 ** Math.floor(Math.log10(raw));
  return ten * [1, 2, 5, 10].find(m => m * ten >= raw);
};

// Curves [{t, y, stroke, name}] over [0, end], shaded spans [{from, to, name, tone}], marks [{t, name}] and a cursor.
function drawCurves(canvas, {curves, end, spans = [], marks = [], cursor = null, top = null}) {
  paint(canvas, (c, w, h) => {
    const left = 42, right = 10, over = 24, under = 30, most = Math.max(0.1, ...curves.flatMap(u => u.y)), highest = top ?? most * 1.1;
    const px = t => left + (w - left - right) * Math.min(t, end) / end, py = y => h - under - (h - over - under) * y / highest;
    c.font = "12px system-ui, sans-serif";
    for (const span of spans) {
      if (span.from >= end) continue;
      c.fillStyle = colour(span.tone); c.fillRect(px(span.from), over, px(span.to) - px(span.from), h - over - under);
      c.fillStyle = colour("faint"); c.textAlign = "left";
      if (px(span.to) - px(span.from) > c.measureText(span.name).width + 8) c.fillText(span.name, px(span.from) + 4, over + 14);
    }
    c.strokeStyle = colour("line"); c.fillStyle = colour("faint"); c.lineWidth = 1;
    c.beginPath(); c.moveTo(left, over); c.lineTo(left, h - under); c.lineTo(w - right, h - under); c.stroke();
    c.textAlign = "center";
    const stride = niceStep(end, Math.max(2, w / 90));
    for (let t = 0; t <= end * 1.0001; t += stride) c.fillText(+t.toPrecision(6), px(t), h - under + 16);
    c.fillText("t", w - right - 3, h - 3);
    c.textAlign = "right";
    const rise = niceStep(highest, 4);
    for (let y = 0; y <= highest * 1.0001; y += rise) c.fillText(+y.toPrecision(3), left - 6, py(y) + 4);
    c.setLineDash([4, 4]); c.strokeStyle = colour("target");
    for (const mark of marks) if (mark.t <= end) {
      c.beginPath(); c.moveTo(px(mark.t), over); c.lineTo(px(mark.t), h - under); c.stroke();
      const fits = px(mark.t) + c.measureText(mark.name).width + 8 <= w;
      c.fillStyle = colour("target"); c.textAlign = fits ? "left" : "right";
      c.fillText(mark.name, px(mark.t) + (fits ? 4 : -4), over + 30);
    }
    c.setLineDash([]); c.lineWidth = 2;
    let at = left;
    for (const curve of curves) {
      c.strokeStyle = c.fillStyle = curve.stroke;
      c.beginPath();
      curve.t.forEach((t, i) => (i ? c.lineTo(px(t), py(curve.y[i])) : c.moveTo(px(t), py(curve.y[i]))));
      c.stroke();
      c.textAlign = "left"; c.fillText(curve.name, at, 14); at += c.measureText(curve.name).width + 18;
    }
    if (cursor !== null) {
      c.strokeStyle = colour("text"); c.lineWidth = 1;
      c.beginPath(); c.moveTo(px(cursor), over); c.lineTo(px(cursor), h - under); c.stroke();
    }
  });
}
