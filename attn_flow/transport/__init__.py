"""How far two clouds of tokens are: Wasserstein distances that are exact or have a proved error."""

from attn_flow.transport.distances import Transport, solve, wasserstein
from attn_flow.transport.exact import CertificateError
from attn_flow.transport.sinkhorn import Sinkhorn
from attn_flow.transport.sliced import Sliced

__all__ = ["CertificateError", "Sinkhorn", "Sliced", "Transport", "solve", "wasserstein"]
