"""How far two laws are: Wasserstein distances, exact or with a proved error."""

from attn_flow.transport.distances import Limits, Transport, solve, wasserstein

__all__ = ["Limits", "Transport", "solve", "wasserstein"]
