"""A law of tokens: its scaled log-partition and the gradient of it, the tilted mean that attention computes."""

from attn_flow.measures.cloud import Cloud
from attn_flow.measures.elliptic import EllipsoidSupport, Gaussian, LogitLaw
from attn_flow.measures.measure import Measure
from attn_flow.measures.mixture import Mixture
from attn_flow.measures.own_tokens import OwnTokens, SeenGaussian
from attn_flow.measures.sphere import UniformSphere
from attn_flow.measures.von_mises_fisher import VonMisesFisher

__all__ = [
    "Cloud",
    "EllipsoidSupport",
    "Gaussian",
    "LogitLaw",
    "Measure",
    "Mixture",
    "OwnTokens",
    "SeenGaussian",
    "UniformSphere",
    "VonMisesFisher",
]
