// Self-attention on the circle or the sphere: the flow, its predicted limit, and the distance between the two.
// Tokens are {n, x: [X, Y, Z]} with Z = 0 on the circle; G and V are 3 x 3, padded with zeros there.
"use strict";
const TOL = 1e-6;  // relative gap below which eigenvalues count as equal, as in attn_flow.limit

const cloudOf = n => ({n, x: [0, 1, 2].map(() => new Float64Array(n))});
const padded = A => [0, 1, 2].map(i => [0, 1, 2].map(j => (A[i] && A[i][j]) || 0));
const dot = (u, v) => u[0] * v[0] + u[1] * v[1] + u[2] * v[2];
const norm = u => Math.sqrt(dot(u, u));
const times = (A, u) => A.map(row => dot(row, u));
const product = (A, B) => A.map(row => [0, 1, 2].map(j => row[0] * B[0][j] + row[1] * B[1][j] + row[2] * B[2][j]));
const combine = (a, A, b, B) => A.map((row, i) => row.map((v, j) => a * v + b * B[i][j]));
const size = A => Math.hypot(...A.flat());
const token = (cloud, i) => [cloud.x[0][i], cloud.x[1][i], cloud.x[2][i]];
const unit = d => padded(Array.from({length: d}, (_, i) => Array.from({length: d}, (_, j) => +(i === j))));
const column = (A, j) => A.map(row => row[j]);

// x' = P_x V m(G x): softmax and hardmax average the tokens, unnormalised attention sums e^{beta <Gx, y>} y / n.
function velocity({G, V, beta, kind}, cloud, out) {
  const [X, Y, Z] = cloud.x, n = cloud.n, hard = kind === "hardmax" || beta === Infinity;
  const score = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    const q = times(G, token(cloud, i));
    let top = -Infinity;
    for (let j = 0; j < n; j++) {
      const s = score[j] = q[0] * X[j] + q[1] * Y[j] + q[2] * Z[j];
      if (s > top) top = s;
    }
    let a = 0, b = 0, c = 0, total = 0;
    for (let j = 0; j < n; j++) {
      let w;
      if (kind === "unnormalised") w = Math.exp(beta * score[j]) / n;
      else if (hard) { if (score[j] !== top) continue; w = 1; }
      else { const logit = beta * (score[j] - top); if (logit < -45) continue; w = Math.exp(logit); }
      a += w * X[j]; b += w * Y[j]; c += w * Z[j]; total += w;
    }
    if (kind === "unnormalised") total = 1;
    const x = token(cloud, i), F = times(V, [a / total, b / total, c / total]), radial = dot(x, F);
    for (let k = 0; k < 3; k++) out.x[k][i] = F[k] - radial * x[k];
  }
  return out;
}

// x + h sum_j a_j k_j, back on the sphere.
function along(cloud, h, weights, stages) {
  const moved = cloudOf(cloud.n);
  for (let i = 0; i < cloud.n; i++) {
    const x = token(cloud, i);
    weights.forEach((a, j) => { if (a) for (let k = 0; k < 3; k++) x[k] += h * a * stages[j].x[k][i]; });
    const r = norm(x);
    for (let k = 0; k < 3; k++) moved.x[k][i] = x[k] / r;
  }
  return moved;
}

const TABLEAUS = {
  euler: {a: [], b: [1]},
  rk4: {a: [[1 / 2], [0, 1 / 2], [0, 0, 1]], b: [1 / 6, 1 / 3, 1 / 3, 1 / 6]},
};

// One step; `turn` is the largest angle by which a token moved, a step's own warning.
function step(attention, cloud, h, name = "rk4") {
  const {a, b} = TABLEAUS[name], stages = [velocity(attention, cloud, cloudOf(cloud.n))];
  for (const row of a) stages.push(velocity(attention, along(cloud, h, row, stages), cloudOf(cloud.n)));
  let turn = 0;
  for (let i = 0; i < cloud.n; i++) turn = Math.max(turn, h * norm(token(stages[0], i)));
  return {cloud: along(cloud, h, b, stages), turn};
}

// x <- retract(x + sqrt(h) sigma xi), every token its own kick, in d dimensions.
function kicked(cloud, h, sigma, d, random) {
  const kicks = cloudOf(cloud.n);
  for (let k = 0; k < d; k++) for (let i = 0; i < cloud.n; i++) kicks.x[k][i] = sigma * normal(random);
  return along(cloud, Math.sqrt(h), [1], [kicks]);
}

// Random numbers from a seed (mulberry32), so that a link shows the same tokens.
function generator(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6D2B79F5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}
const normal = random => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());

// The initial law: uniform, or tilted with density e^{<c, x>}, |c| = 1 (the exit needs an asymmetric law): drawn at
// random, or "even", laid out with equal masses between neighbours, so that chance plays no part.
const TILT = [Math.cos(1), Math.sin(1), 0];
function start(n, d, law, seed) {
  const cloud = cloudOf(n), random = generator(seed);
  const put = (i, x) => { const r = norm(x); for (let k = 0; k < 3; k++) cloud.x[k][i] = x[k] / r; };
  if (law === "even") {
    evenly(n, d).forEach((x, i) => put(i, x));
    return cloud;
  }
  for (let i = 0; i < n;) {
    const x = [normal(random), normal(random), d === 3 ? normal(random) : 0];
    if (law === "tilted" && random() > Math.exp(dot(TILT, x) / norm(x) - 1)) continue;
    put(i, x);
    i++;
  }
  return cloud;
}

// The tilted law in equal masses: its quantiles on the circle; on the sphere its quantiles along c, at golden angles.
function evenly(n, d) {
  const golden = Math.PI * (3 - Math.sqrt(5)), side = [-TILT[1], TILT[0], 0], found = [];
  if (d === 3) {
    for (let i = 0; i < n; i++) {
      const u = (i + 0.5) / n, w = 1 + Math.log(u + (1 - u) * Math.exp(-2)), r = Math.sqrt(Math.max(0, 1 - w * w));
      const a = r * Math.cos(golden * i), b = r * Math.sin(golden * i);
      found.push([w * TILT[0] + a * side[0], w * TILT[1] + a * side[1], b]);
    }
    return found;
  }
  const cells = 20000, density = j => Math.exp(Math.cos(-Math.PI + (j + 0.5) * 2 * Math.PI / cells));
  let total = 0, sum = 0;
  for (let j = 0; j < cells; j++) total += density(j);
  for (let j = 0, i = 0; j < cells && i < n; j++) {
    const mass = density(j) / total;
    for (; i < n && (i + 0.5) / n <= sum + mass; i++) {
      const angle = 1 - Math.PI + (j + ((i + 0.5) / n - sum) / mass) * 2 * Math.PI / cells;
      found.push([Math.cos(angle), Math.sin(angle), 0]);
    }
    sum += mass;
  }
  return found;
}

// Eigenvalues {re, im} of the leading d x d block, largest real part first.
function eigenvalues(A, d) {
  const pair = (sum, prod) => {  // roots of z^2 - sum z + prod
    const disc = sum * sum / 4 - prod;
    if (disc < 0) return [{re: sum / 2, im: Math.sqrt(-disc)}, {re: sum / 2, im: -Math.sqrt(-disc)}];
    const far = sum / 2 + (sum < 0 ? -1 : 1) * Math.sqrt(disc);
    return [{re: far, im: 0}, {re: far === 0 ? 0 : prod / far, im: 0}];
  };
  let found;
  if (d === 2) found = pair(A[0][0] + A[1][1], A[0][0] * A[1][1] - A[0][1] * A[1][0]);
  else {
    // Shifted to trace 0 and scaled to size 1, so that p(z) = z^3 + second z - det, and a triple root is seen as one.
    const third = (A[0][0] + A[1][1] + A[2][2]) / 3, B = combine(1, A, -third, unit(3)), s = size(B);
    if (s <= 1e-14 * Math.abs(third)) return [0, 1, 2].map(() => ({re: third, im: 0}));
    const minor = (i, j) => (B[i][i] * B[j][j] - B[i][j] * B[j][i]) / s ** 2;
    const cross = [B[1][1] * B[2][2] - B[1][2] * B[2][1], B[1][2] * B[2][0] - B[1][0] * B[2][2],
                   B[1][0] * B[2][1] - B[1][1] * B[2][0]];
    const second = minor(0, 1) + minor(0, 2) + minor(1, 2), det = dot(B[0], cross) / s ** 3;
    if (Math.abs(second) < 1e-13 && Math.abs(det) < 1e-13) return [0, 1, 2].map(() => ({re: third, im: 0}));
    let high = 2, low = -2;  // one real root by bisection, the other two from a quadratic
    for (let k = 0; k < 60; k++) { const z = (low + high) / 2; if ((z * z + second) * z > det) high = z; else low = z; }
    const root = (low + high) / 2, back = z => ({re: third + s * z.re, im: s * z.im});
    found = [{re: root, im: 0}, ...pair(-root, second + root * root)].map(back);
  }
  return found.sort((a, b) => b.re - a.re || b.im - a.im);
}

// Groups of eigenvalues of equal real part, each with the spectral projector onto its subspace and a basis of it.
function levels(A, d) {
  const small = TOL * size(A), roots = eigenvalues(A, d), groups = [];
  for (const z of roots) {
    const last = groups[groups.length - 1];
    if (last && last[last.length - 1].re - z.re <= small) last.push(z); else groups.push([z]);
  }
  const I = unit(d);
  const polynomial = (group, z) => group.reduce((v, r) => {  // prod (z - r), real for groups closed under conjugation
    return {re: v.re * (z - r.re) + v.im * r.im, im: v.im * (z - r.re) - v.re * r.im};
  }, {re: 1, im: 0}).re;
  const ofMatrix = group => group.length === 1 ? combine(1, A, -group[0].re, I)
    : combine(1, product(A, A), 1, combine(-group[0].re - group[1].re, A,
        group[0].re * group[1].re - group[0].im * group[1].im, I));
  return groups.map(group => {
    const rest = groups.filter(other => other !== group).flat();
    let Pi = I;
    if (rest.length && group.length === 1) Pi = scaled(ofMatrix(rest), 1 / polynomial(rest, group[0].re));
    else if (rest.length) Pi = combine(1, I, -1 / polynomial(group, rest[0].re), ofMatrix(group));
    return {re: group.reduce((sum, z) => sum + z.re, 0) / group.length, im: Math.max(...group.map(z => z.im)),
            k: group.length, Pi, basis: range(Pi, group.length)};
  });
}
const scaled = (A, c) => A.map(row => row.map(v => c * v));

// k orthonormal vectors that span the columns of A: the longest first, what is left of the others after it.
function range(A, k) {
  const found = [], rest = [0, 1, 2].map(j => column(A, j));
  for (let step = 0; step < k; step++) {
    const longest = rest.reduce((a, b) => norm(b) > norm(a) ? b : a), r = norm(longest), e = longest.map(v => v / r);
    found.push(e);
    rest.forEach((u, j) => { const c = dot(u, e); rest[j] = u.map((v, i) => v - c * e[i]); });
  }
  return found;
}

// |G e| of the slowest e in a level (2-norm on its basis), averaged over a turn where the level rotates.
function speed(M, G, level) {
  if (level.k === 1) return norm(times(G, level.basis[0]));
  const [u, v] = level.basis, turning = level.k === 2 && level.im > 1e-12 * size(M);
  if (turning) {
    const A = combine(1 / level.im, M, -level.re / level.im, unit(3));
    let sum = 0;
    for (let j = 0; j < 512; j++) {
      const s = 2 * Math.PI * j / 512, w = times(A, u), e = u.map((a, i) => Math.cos(s) * a + Math.sin(s) * w[i]);
      sum += norm(times(G, e)) / norm(e) / 512;
    }
    return sum;
  }
  const [a, b] = [times(G, u), times(G, v)], S = [[dot(a, a), dot(a, b), 0], [dot(a, b), dot(b, b), 0], [0, 0, 0]];
  return Math.sqrt(eigenvalues(S, 2)[0].re);
}

// Where softmax attention goes at low temperature, as attn_flow.limit has it: case, E, rates, exit.
function predict({G, V}, d) {
  const singular = eigenvalues(product(G[0].map((_, j) => column(G, j)), G), d);
  if (singular[d - 1].re <= TOL * TOL * singular[0].re || singular[0].re === 0)
    return {case: "undefined", why: "G is singular: tokens of its kernel have no direction to look in"};
  const M = product(V, G), [first, ...below] = levels(M, d), whole = size(M);
  const N = product(combine(1, M, -first.re, unit(d)), first.Pi);
  let kind = size(N) <= TOL * whole ? "fixed" : first.im > TOL * whole ? "rotating" : "jordan", direction = first.Pi;
  if (kind === "fixed" && !below.length) return {case: "stationary", why: "M = V G is a multiple of the identity"};
  if (kind === "jordan") {
    direction = N;
    const twice = product(N, N);
    if (first.k === 3 && size(twice) > 1e-10 * size(N) ** 2) direction = twice;
  }
  const atoms = first.k === 1 || kind === "jordan";  // the limits are +-e: beside a Jordan block its last vector alone
  const basis = atoms ? range(direction, 1) : first.basis;
  const found = {case: kind, k: basis.length, basis, leading: first.re, direction, frequency: first.im};
  if (!below.length) return found;
  const slow = speed(M, G, first);
  found.g = (first.re - below[0].re) / slow;
  const decays = below.map((level, j) => [first, ...below.slice(0, j)]
    .reduce((sum, upper) => sum + upper.k * (upper.re - level.re), 0) / speed(M, G, level));
  found.tail = Math.min(...decays);
  found.rate = kind === "jordan" ? 0 : Math.min(found.g, found.tail / 2);
  if (kind === "fixed" && !atoms) found.exitUnknown = "it is derived for limits at two points only";
  else if (kind === "fixed" && first.re <= TOL * size(V) * size(G)) found.exitUnknown = "the leading eigenvalue of M is not positive";
  else if (kind === "fixed") found.exit = exitRate(first, V, G, d);
  if (kind === "fixed" && !found.exitUnknown && found.exit === undefined)
    found.exitUnknown = "V turns the limit direction e, and it is derived for V e along e only";
  return found;
}

// How fast clusters at +-e leave: each sees itself (gamma > 0) or its antipode; undefined where V e is not along e.
function exitRate({basis: [e]}, V, G, d) {
  const v = dot(e, times(V, e)), off = times(V, e).map((a, i) => a - v * e[i]);
  if (norm(off) > Math.sqrt(TOL) * size(V)) return undefined;
  const across = range(combine(1, unit(d), -1, e.map(a => e.map(b => a * b))), d - 1);
  const inside = padded(across.map(a => across.map(b => dot(a, times(V, b)))));
  const real = d === 2 ? [inside[0][0]] : eigenvalues(inside, 2).map(z => z.re);
  const sees = dot(e, times(G, e)) > 0;
  return Math.max(0, sees ? Math.max(...real) - v : v + Math.max(...real.map(Math.abs)));
}

// The time of least W2, to leading order in log(beta), and when clusters leave; undefined where they are not derived.
function moments(found, beta) {
  if (!(beta > 1) || beta === Infinity || !found.g || found.case !== "fixed" || !(found.exit > 0)) return {};
  const x = found.exit, tMin = Math.log(beta) / (2 * found.g) * (found.g + x) / (found.rate + x);
  // W2 rests if it stays within 25% for at least two e-folding times of its fall, as in attn_flow.phases.
  const rest = Math.log(1.25) / x;
  return {tMin, tExit: rest >= 2 / found.rate ? tMin + rest : tMin};
}

// The distance of a cloud to the predicted limit, and what it is.
// Two atoms +-e: W2 exactly (the tokens furthest along e go to +e). A law on a circle: tokens paired with their
// own limits, which is at least W2. Rotating: to the nearest points of E, at most W2.
function comparison(found, initial) {
  if (found.case === "undefined" || found.case === "stationary") return null;
  const n = initial.n;
  if (found.case === "rotating") {
    return {name: "distance to the set E", measure: cloud => rootMean(n, i => {
      const x = token(cloud, i), shade = [0, 0, 0];
      for (const e of found.basis) { const c = dot(e, x); e.forEach((v, k) => { shade[k] += c * v; }); }
      return 2 - 2 * norm(shade);
    })};
  }
  const limits = cloudOf(n);
  for (let i = 0; i < n; i++) {
    const y = times(found.direction, token(initial, i)), r = norm(y);
    for (let k = 0; k < 3; k++) limits.x[k][i] = y[k] / r;
  }
  if (found.k === 1) {
    const e = found.basis[0], side = Array.from({length: n}, (_, i) => dot(token(limits, i), e) > 0);
    const up = side.filter(Boolean).length;
    return {name: "W2 to the predicted limit", side, up, limits, measure: cloud => {
      const along = Float64Array.from({length: n}, (_, i) => dot(token(cloud, i), e)).sort();
      return rootMean(n, i => 2 - 2 * (i >= n - up ? along[i] : -along[i]));
    }};
  }
  return {name: "paired distance (at least W2)", limits, measure: cloud => rootMean(n, i => {
    const x = token(cloud, i), y = token(limits, i);
    return (x[0] - y[0]) ** 2 + (x[1] - y[1]) ** 2 + (x[2] - y[2]) ** 2;
  })};
}
function rootMean(n, square) {
  let sum = 0;
  for (let i = 0; i < n; i++) sum += Math.max(0, square(i));
  return Math.sqrt(sum / n);
}
