"""Averages of values under attention weights.

    dense      softmax and hardmax over all pairs of queries and keys: this is where attention computes its softmax
    near       softmax over the keys that matter at low temperature, with a proved error
    series     softmax on the circle by Fourier series
    sinkhorn   doubly stochastic weights
    auto       the rule that chooses between dense, near and series

All of them are called as softmax_average(queries, keys, values, log_weights, scale=...), for the logits
scale <queries_i, keys_j> + log_weights_j. Leading axes broadcast.

    queries       (..., m, k)
    keys          (..., n, k)
    values        (..., n, v)
    log_weights   (..., n)     -inf hides a key; None stands for equal weights
    scale         the inverse temperature: a number, or a tensor that broadcasts against the queries

The result is (..., m, v). A query that sees no key has average zero. Only `dense` has a mask of pairs:

    causal        query i sees the keys j <= i

and only `near` and `series`, which approximate, have an accuracy:

    tolerance     relative to the values; None stands for 1e-6 in float32 and 1e-12 in float64
"""
