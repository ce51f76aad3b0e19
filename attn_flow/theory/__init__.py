"""Closed forms from the papers, one module per paper or idea.

| module | what it predicts | arXiv |
|---|---|---|
| `synchronisation` | rates of collapse to one cluster | 2504.14697, 2312.10794 |
| `metastability` | which clusters appear, when, and how long they live | 2410.23228, 2509.25040, 2410.06833 |
| `equiangular` | tokens with equal pairwise cosines: one scalar ODE | 2312.10794 |
| `spectral_selection` | Jacobian eigenvalues at aligned and sign-split states | 2604.26085 |
| `multi_head` | scalar heads: rates | 2605.04279 |
| `noise` | two tokens under common noise or random values | 2604.26898, 2601.21942, 2606.05140 |
| `causal` | collapse on the first token, lost in the middle | 2411.04990, 2605.09213 |
| `normalisation` | contraction under post-, pre-, peri-norm, nGPT, LN-scaling | 2510.22026 |
| `long_context` | one layer on many keys: critical beta | 2510.05554, 2605.08505 |
| `random_energy` | three phases of Gaussian logits | Derrida 1981 |
| `hardmax` | leaders, cells, Frank-Wolfe gap | 2407.01602, 2508.09628 |
| `gaussian` | mean and covariance of Gaussian tokens, blow-up time | 2501.18322 |

Functions accept numbers or arrays, broadcast them, and return float64 numpy arrays; docstrings write (...) for a
broadcast shape. Attention has V = G = I on the unit sphere unless a docstring says otherwise. Some arguments mean the
same everywhere: beta is the inverse temperature, n the number of tokens, d their dimension, rho the cosine of two
tokens, t a time, and `kind` the normalisation of the weights: "softmax", "unnormalised" (e^{beta <x,y>}/n) or
"sinkhorn" (doubly stochastic).
"""
