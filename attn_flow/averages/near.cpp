// Softmax averages of blocks of queries over lists of blocks of keys, for widths up to 8: near.py has the mathematics.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>

constexpr int T = 64;               // keys in a block
constexpr float NEVER = -1e30f;     // the logit of a key that is not seen

// e^x for x <= 0 to 2e-7, 0 below -87: 2^round(x log2 e) from the exponent's bits, the rest by a polynomial.
static inline float exponential(float x) {
  float y = x * 1.44269504f;
  float whole = std::nearbyint(y), f = (y - whole) * 0.693147181f;
  float p = 1.f + f * (1.f + f * (.5f + f * (.166666667f + f * (.0416666667f + f * (.00833333333f + f * .00138888889f)))));
  union { int32_t bits; float value; } power = {(static_cast<int32_t>(whole) + 127) << 23};
  return x > -87.f ? p * power.value : 0.f;
}

struct Problem {
  const double *q, *k, *bias, *centre, *k_star, *bias_star;
  const float *v, *v_star;
  const int64_t *start, *blocks, *i, *j;
  int64_t queries, keys;            // points in a block of each
  bool causal;
  double scale;
  float gap;                        // a block of keys this far below the highest logit so far is left out
  float *average;
  double *log_sum;
};

template <int W, typename Real>
void attend(const Problem& p, int64_t a) {
  const int64_t S = p.queries;
  Real q[T][W], k[W][T], shift[T], logit[T], top[T];
  float v[W][T], weight[T];
  double total[T] = {}, sum[T][W] = {};
  for (int s = 0; s < S; s++) {
    top[s] = NEVER;
    for (int d = 0; d < W; d++) q[s][d] = p.scale * (p.q[(a * S + s) * W + d] - p.centre[a * W + d]);
  }
  for (int64_t at = p.start[a]; at < p.start[a + 1]; at++) {
    const int64_t b = p.blocks[at];
    for (int t = 0; t < T; t++) {
      const bool there = t < p.keys && p.bias[b * p.keys + t] > NEVER;
      double along = 0;
      for (int d = 0; d < W; d++) {
        const double away = there ? p.k[(b * p.keys + t) * W + d] - p.k_star[a * W + d] : 0.;
        k[d][t] = away;
        v[d][t] = there ? p.v[(b * p.keys + t) * W + d] - p.v_star[a * W + d] : 0.f;
        along += away * p.centre[a * W + d];
      }
      shift[t] = there ? p.scale * along + p.bias[b * p.keys + t] - p.bias_star[a] : NEVER;
    }
    for (int s = 0; s < S; s++) {
      Real highest = NEVER;
#pragma omp simd reduction(max : highest)
      for (int t = 0; t < T; t++) {
        Real l = shift[t];
        for (int d = 0; d < W; d++) l += q[s][d] * k[d][t];
        logit[t] = l;
        highest = logit[t] > highest ? logit[t] : highest;
      }
      if (p.causal) {
        const int64_t me = p.i[a * S + s];
        highest = NEVER;
        for (int t = 0; t < p.keys; t++) {
          const int64_t other = p.j[b * p.keys + t];
          if (other > me) logit[t] = NEVER;
          highest = logit[t] > highest ? logit[t] : highest;
        }
      }
      if (highest <= Real(.5) * NEVER || highest < top[s] - p.gap) continue;
      if (highest > top[s]) {
        const double shrink = std::exp(static_cast<double>(top[s]) - highest);
        total[s] *= shrink;
        for (int d = 0; d < W; d++) sum[s][d] *= shrink;
        top[s] = highest;
      }
      const Real from = top[s];
      float mass = 0;
#pragma omp simd reduction(+ : mass)
      for (int t = 0; t < T; t++) mass += weight[t] = exponential(logit[t] - from);
      for (int d = 0; d < W; d++) {
        float one = 0;
#pragma omp simd reduction(+ : one)
        for (int t = 0; t < T; t++) one += weight[t] * v[d][t];
        sum[s][d] += one;
      }
      total[s] += mass;
    }
  }
  for (int s = 0; s < S; s++) {
    p.log_sum[a * S + s] = total[s] > 0 ? top[s] + std::log(total[s]) : -HUGE_VAL;
    for (int d = 0; d < W; d++)
      p.average[(a * S + s) * W + d] = p.v_star[a * W + d] + (total[s] > 0 ? sum[s][d] / total[s] : 0);
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

TORCH_LIBRARY(attn_flow, library) {
  library.def("near_softmax", softmax);
}
