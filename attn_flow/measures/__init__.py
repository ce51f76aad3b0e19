"""Distributions of tokens: the log-partition of each and its gradient, the tilted mean that attention computes."""
