"""Real encoders as the core's nouns: a Trajectory of their states, an Attention per layer, a layer as a flow."""

from .architectures import ROWS, Row, register
from .blocks import Block, blocks
from .embedded import load
from .findings import Probe
from .probe import probe
from .record import record, recording
from .stream import Statistics, merge
from .tape import KINDS, Tape
from .temperature import scale_beta
from .weights import Check, Norm, attentions, check, describe, folded, geometries, norms
from .wrap import wrap

__all__ = [
    "KINDS",
    "ROWS",
    "Block",
    "Check",
    "Norm",
    "Probe",
    "Row",
    "Statistics",
    "Tape",
    "attentions",
    "blocks",
    "check",
    "describe",
    "folded",
    "geometries",
    "load",
    "merge",
    "norms",
    "probe",
    "record",
    "recording",
    "register",
    "scale_beta",
    "wrap",
]
