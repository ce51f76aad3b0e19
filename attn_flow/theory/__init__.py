"""Closed forms of the papers, one file a topic; each function carries its equation and its arXiv number.

| file | what it predicts | paper |
|---|---|---|
| `synchronisation` | rates of collapse to one cluster | 2504.14697, 2312.10794 |
| `metastability` | which clusters appear, where, when; how long they live | 2410.23228, 2509.25040, 2410.06833 |
| `equiangular` | rho(t) of equiangular tokens, its time in closed form, the phase-diagram curve | 2312.10794 |
| `spectral_selection` | Jacobian eigenvalues at homogeneous and sign-split states | 2604.26085 |
| `multi_head` | scalar heads: rates, super-additivity, attention entropy | 2605.04279 |
| `noise` | two tokens under common noise, Lyapunov exponents, random values | 2604.26898, 2601.21942 |
| `causal` | collapse on the first token, retrieval profile, lost in the middle | 2411.04990, 2605.09213 |
| `normalisation` | contraction laws of Post-, Pre-, Peri-LN, nGPT, LN-scaling | 2510.22026 |
| `long_context` | one layer on a long context: critical beta, Poisson law | 2510.05554, 2605.08505 |
| `gap_counting` | the beta at which one key holds half of an attention row | 2605.12697 |
| `hardmax` | leaders, cells, Frank-Wolfe gap | 2407.01602, 2508.09628 |
| `gaussian` | mean and covariance of a Gaussian law, blow-up time | 2501.18322 |

Scalars or arrays in, numpy out; arguments broadcast. Models have V = G = I on the unit sphere unless a docstring says
otherwise.
"""
