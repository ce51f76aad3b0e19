"""Distributions of tokens: the log-partition of each and its gradient, the tilted mean that attention computes."""

from attn_flow.measures.cloud import Cloud, as_cloud
from attn_flow.measures.gaussian import EllipsoidSupport, Gaussian
from attn_flow.measures.measure import Measure
from attn_flow.measures.mixture import Mixture
from attn_flow.measures.sphere import UniformSphere
from attn_flow.measures.von_mises_fisher import VonMisesFisher

__all__ = [
    "Cloud",
    "EllipsoidSupport",
    "Gaussian",
    "Measure",
    "Mixture",
    "UniformSphere",
    "VonMisesFisher",
    "as_cloud",
]
