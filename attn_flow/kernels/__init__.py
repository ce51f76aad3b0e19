"""Averages under attention weights; the kernels share one signature, described in `dense`."""
