"""Words of mathematics in captions and labels, typeset."""

import pytest

from attn_flow.base.figures import typeset


@pytest.mark.parametrize(
    ("plain", "shown"),
    [
        ("time t", "time $t$"),
        ("W2 at beta = inf", r"$W_2$ at $\beta$ = " + "\u221e"),
        ("gamma_k, mu_0, k_max and t_crit", r"$\gamma_{k}$, $\mu_{0}$, $k_{\rm max}$ and $t_{\rm crit}$"),
        ("(b, c) n=3, (d-f) a line for each d.", "(b, c) $n$=3, (d-f) a line for each $d$."),
        ("V=-I in R^d, n^(-1/2)", "$V$=-$I$ in $R^{d}$, $n^{-1/2}$"),
        ("MiniLM's i != j, T <= 1", "MiniLM's $i$ \u2260 $j$, $T$ \u2264 1"),
        (r"$\beta$ and $x_1$ stay", r"$\beta$ and $x_1$ stay"),
    ],
)
def test_plain_words_become_mathematics_once(plain: str, shown: str) -> None:
    assert typeset(plain) == shown
    assert typeset(shown) == shown
