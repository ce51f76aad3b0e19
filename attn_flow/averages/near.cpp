// Patches of neighbours, bounds of their logits, and softmax averages of patches of queries over lists of patches of
// keys, for widths up to 8: near.py and patches.py have the mathematics. Queries lie side by side in a vector, so that
// nothing is summed across one.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

constexpr int T = 32;               // most points in a patch
constexpr float NEVER = -1e30f;     // the logit of a key that is not seen
#ifdef __AVX512F__
constexpr int L = 16;               // numbers in a vector
#else
constexpr int L = 8;
#endif
typedef float Floats __attribute__((vector_size(L * 4)));
typedef int32_t Whole __attribute__((vector_size(L * 4)));
typedef double Doubles __attribute__((vector_size(L * 8)));
template <typename Real> struct Vector;
template <> struct Vector<float> { typedef Floats type; };
template <> struct Vector<double> { typedef Doubles type; };

// e^x for x <= 0 to 2e-7, 0 below -87: 2^round(x log2 e) from the exponent's bits, the rest by a polynomial.
static inline Floats exponential(Floats x) {
  const Floats low = x - x - 87.f, kept = x > low ? x : low;
  const Floats y = kept * 1.44269504f;
  const Whole whole = __builtin_convertvector(y - .5f, Whole);  // cut towards 0, and y <= 0
  const Floats f = (y - __builtin_convertvector(whole, Floats)) * 0.693147181f;
  const Floats p =
      1.f + f * (1.f + f * (.5f + f * (.166666667f + f * (.0416666667f + f * (.00833333333f + f * .00138888889f)))));
  const Whole bits = (whole + 127) << 23;
  const Floats found = p * reinterpret_cast<const Floats&>(bits);
  return x > low ? found : x - x;
}

static inline Floats in_float(Floats x) { return x; }
static inline Floats in_float(Doubles x) { return __builtin_convertvector(x, Floats); }

struct Problem {
  const double *q, *k, *bias, *centre, *k_star, *bias_star;
  const float *v, *v_star;
  const int64_t *start, *blocks, *i, *j;
  int64_t queries, keys;            // points in a patch of each
  bool causal;
  double scale;
  float gap;                        // a patch of keys this far below the highest logits so far is left out
  float *average;
  double *log_sum;
};

template <int W, typename Real>
void attend(const Problem& p, int64_t a) {
  typedef typename Vector<Real>::type Reals;
  constexpr int P = T / L;
  const int64_t S = p.queries;
  const Reals nothing = {};
  Reals q[P][W], top[P], logit[T][P];
  Doubles total[P], sum[P][W];
  int64_t me[T] = {};
  for (int s = 0; s < T; s++) {
    const int64_t at = a * S + std::min<int64_t>(s, S - 1);
    me[s] = p.i[at];
    for (int d = 0; d < W; d++) q[s / L][d][s % L] = p.scale * (p.q[at * W + d] - p.centre[a * W + d]);
  }
  for (int u = 0; u < P; u++) {
    top[u] = nothing + Real(.5f * NEVER);  // above what is not seen
    total[u] = Doubles{};
    for (int d = 0; d < W; d++) sum[u][d] = Doubles{};
  }
  for (int64_t at = p.start[a]; at < p.start[a + 1]; at++) {
    const int64_t b = p.blocks[at];
    Real k[T][W], shift[T];
    float v[T][W];
    for (int64_t t = 0; t < p.keys; t++) {
      const int64_t key = b * p.keys + t;
      const bool there = p.bias[key] > NEVER;
      double along = 0;
      for (int d = 0; d < W; d++) {
        const double away = there ? p.k[key * W + d] - p.k_star[a * W + d] : 0.;
        k[t][d] = away;
        v[t][d] = there ? p.v[key * W + d] - p.v_star[a * W + d] : 0.f;
        along += away * p.centre[a * W + d];
      }
      shift[t] = there ? p.scale * along + p.bias[key] - p.bias_star[a] : NEVER;
    }
    bool seen = false;
    Reals high[P];
    for (int u = 0; u < P; u++) {
      Reals h = nothing + Real(NEVER);
      for (int64_t t = 0; t < p.keys; t++) {
        Reals l = nothing + shift[t];
        for (int d = 0; d < W; d++) l += q[u][d] * k[t][d];
        if (p.causal)
          for (int s = 0; s < L; s++)
            if (p.j[b * p.keys + t] > me[u * L + s]) l[s] = NEVER;
        logit[t][u] = l;
        h = l > h ? l : h;
      }
      high[u] = h;
      for (int s = 0; s < L; s++) seen |= h[s] > Real(.5f * NEVER) && h[s] >= top[u][s] - p.gap;
    }
    if (!seen) continue;
    for (int u = 0; u < P; u++) {
      const Reals from = high[u] > top[u] ? high[u] : top[u];
      const Doubles shrink = __builtin_convertvector(exponential(in_float(top[u] - from)), Doubles);
      Floats mass = {}, one[W] = {};
      for (int64_t t = 0; t < p.keys; t++) {
        const Floats weight = exponential(in_float(logit[t][u] - from));
        mass += weight;
        for (int d = 0; d < W; d++) one[d] += weight * v[t][d];
      }
      top[u] = from;
      total[u] = total[u] * shrink + __builtin_convertvector(mass, Doubles);
      for (int d = 0; d < W; d++) sum[u][d] = sum[u][d] * shrink + __builtin_convertvector(one[d], Doubles);
    }
  }
  for (int64_t s = 0; s < S; s++) {
    const int u = s / L, at = s % L;
    const double mass = total[u][at];
    p.log_sum[a * S + s] = mass > 0 ? static_cast<double>(top[u][at]) + std::log(mass) : -HUGE_VAL;
    for (int d = 0; d < W; d++)
      p.average[(a * S + s) * W + d] = p.v_star[a * W + d] + (mass > 0 ? sum[u][d][at] / mass : 0);
  }
}

template <typename Real>
void attend(const Problem& p, int64_t a, int64_t width) {
  switch (width) {
    case 1: return attend<1, Real>(p, a);
    case 2: return attend<2, Real>(p, a);
    case 3: return attend<3, Real>(p, a);
    case 4: return attend<4, Real>(p, a);
    case 5: return attend<5, Real>(p, a);
    case 6: return attend<6, Real>(p, a);
    case 7: return attend<7, Real>(p, a);
    default: return attend<8, Real>(p, a);
  }
}

// Shapes as in near.py, contiguous; keys, values and queries of one width. precise: logits in double.
std::tuple<at::Tensor, at::Tensor> softmax(
    const at::Tensor& q, const at::Tensor& centre, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias,
    const at::Tensor& k_star, const at::Tensor& v_star, const at::Tensor& bias_star, const at::Tensor& start,
    const at::Tensor& blocks, const at::Tensor& i, const at::Tensor& j, bool causal, double scale,
    double gap, bool precise) {
  const int64_t A = q.size(0), width = q.size(2);
  TORCH_CHECK(q.size(1) <= T && k.size(1) <= T && width <= 8, "patches of at most ", T, " points of width 8 or less");
  auto average = at::empty({A, q.size(1), width}, v.options());
  auto log_sum = at::empty({A, q.size(1)}, q.options());
  const Problem p{q.const_data_ptr<double>(), k.const_data_ptr<double>(), bias.const_data_ptr<double>(),
                  centre.const_data_ptr<double>(), k_star.const_data_ptr<double>(), bias_star.const_data_ptr<double>(),
                  v.const_data_ptr<float>(), v_star.const_data_ptr<float>(), start.const_data_ptr<int64_t>(),
                  blocks.const_data_ptr<int64_t>(), i.const_data_ptr<int64_t>(), j.const_data_ptr<int64_t>(),
                  q.size(1), k.size(1), causal, scale, static_cast<float>(gap),
                  average.mutable_data_ptr<float>(), log_sum.mutable_data_ptr<double>()};
  at::parallel_for(0, A, 1, [&](int64_t from, int64_t to) {
    for (int64_t a = from; a < to; a++) precise ? attend<double>(p, a, width) : attend<float>(p, a, width);
  });
  return {average, log_sum};
}

// Indices (2^levels, n / 2^levels) of the rows of x (n, k): every part halved across its widest axis.
at::Tensor halved(const at::Tensor& x, int64_t levels) {
  const int64_t n = x.size(0), width = x.size(1);
  const float* z = x.const_data_ptr<float>();
  auto index = at::arange(n, x.options().dtype(at::kLong));
  int64_t* order = index.mutable_data_ptr<int64_t>();
  for (int64_t level = 0; level < levels; level++) {
    const int64_t size = n >> level;
    at::parallel_for(0, int64_t(1) << level, 1, [&](int64_t from, int64_t to) {
      for (int64_t part = from; part < to; part++) {
        int64_t* first = order + part * size;
        int64_t axis = 0;
        float widest = -1;
        for (int64_t d = 0; d < width; d++) {
          float low = z[first[0] * width + d], high = low;
          for (int64_t t = 1; t < size; t++) {
            const float one = z[first[t] * width + d];
            low = one < low ? one : low;
            high = one > high ? one : high;
          }
          if (high - low > widest) widest = high - low, axis = d;
        }
        std::nth_element(first, first + size / 2, first + size,
                         [&](int64_t a, int64_t b) { return z[a * width + axis] < z[b * width + axis]; });
      }
    });
  }
  return index.view({int64_t(1) << levels, n >> levels});
}

template <int W>
void find_highest(const float* rows, const float* points, int64_t A, int64_t B, int64_t size, float* found) {
  at::parallel_for(0, (A + L - 1) / L, 1, [&](int64_t from, int64_t to) {
    for (int64_t part = from; part < to; part++) {
      const int64_t first = part * L, count = std::min<int64_t>(L, A - first);
      Floats r[W] = {};
      for (int64_t s = 0; s < count; s++)
        for (int d = 0; d < W; d++) r[d][s] = rows[(first + s) * W + d];
      const float* point = points;
      for (int64_t b = 0; b < B; b++) {
        Floats most = r[0] - r[0] + NEVER;
        for (int64_t t = 0; t < size; t++, point += W) {
          Floats one = r[0] * point[0];
          for (int d = 1; d < W; d++) one += r[d] * point[d];
          most = one > most ? one : most;
        }
        for (int64_t s = 0; s < count; s++) found[(first + s) * B + b] = most[s];
      }
    }
  });
}

// The largest <row, point> of rows (A, k) over the points (B, size, k) of each patch, (A, B); k <= 9.
at::Tensor highest(const at::Tensor& rows, const at::Tensor& points) {
  const int64_t A = rows.size(0), B = points.size(0), size = points.size(1);
  auto found = at::empty({A, B}, rows.options());
  const float *r = rows.const_data_ptr<float>(), *c = points.const_data_ptr<float>();
  float* out = found.mutable_data_ptr<float>();
  switch (rows.size(1)) {
    case 2: find_highest<2>(r, c, A, B, size, out); break;
    case 3: find_highest<3>(r, c, A, B, size, out); break;
    case 4: find_highest<4>(r, c, A, B, size, out); break;
    case 5: find_highest<5>(r, c, A, B, size, out); break;
    case 6: find_highest<6>(r, c, A, B, size, out); break;
    case 7: find_highest<7>(r, c, A, B, size, out); break;
    case 8: find_highest<8>(r, c, A, B, size, out); break;
    case 9: find_highest<9>(r, c, A, B, size, out); break;
    default: TORCH_CHECK(false, "points of width ", rows.size(1), ", expected 2 to 9");
  }
  return found;
}

TORCH_LIBRARY(attn_flow, library) {
  library.def("near_softmax", softmax);
  library.def("near_halved", halved);
  library.def("near_highest", highest);
}
