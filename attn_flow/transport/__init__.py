"""How far two clouds of tokens are: Wasserstein distances that are exact or have a proved error.

`distances` has the public functions. One file per method: `assignment`, `network_simplex`, `shortlist`,
`one_dimension` (line and circle), `sinkhorn`, `sliced`. To add a method, write a function in a file of its own, add a
row to `SOLVERS` in `exact`, and a line to the docstring of `solve` in `distances`.
"""

from attn_flow.transport.distances import CertificateError, Transport, solve, wasserstein
from attn_flow.transport.sliced import Sliced

__all__ = ["CertificateError", "Sliced", "Transport", "solve", "wasserstein"]
