"""Which case a limit is in, and how that is known, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.prediction.spectrum import Spectrum
from attn_flow.prediction.zero_temperature import Support, is_nonzero


def case_outside_kernel(spectrum: Spectrum, M: Tensor, N: Tensor, tol: float) -> str:
    """The case of tokens outside ker N, for singular N: "undefined" if they run into it in finite time.

    Time is t = int |N x|/|x| dtau along x = e^{tau M} x_0, and 0 is an eigenvalue of M. A positive leading part keeps
    |N x|/|x| away from 0. With leading part 0 directions tend to E; if E is semisimple, |N Pi x| decides. At a Jordan
    block of index q, M^{q-1} Pi = V (N M^{q-2} Pi) is not 0, so that |N x|/|x| falls no faster than 1/tau: time goes on
    like log tau, and tokens approach exponentially in t.
    """
    norm = lambda A: float(torch.linalg.matrix_norm(A, 2))
    if spectrum.leading > tol * norm(M):
        return spectrum.case
    if spectrum.case == "jordan":
        return "undefined" if spectrum.frequencies else "jordan"
    return spectrum.case if norm(N @ spectrum.projector) > tol * norm(N) * norm(spectrum.projector) else "undefined"


def reason(spectrum: Spectrum, case: str, is_singular: bool, threshold: float) -> str:
    """How the case of a linear limit is known; G is singular or not, and gaps below the threshold count as zero."""
    leading, frequencies = f"{spectrum.leading:.6g}", ", ".join(f"{b:.6g}i" for b in spectrum.frequencies)
    gap = f"gap {spectrum.gap:.3g} > {threshold:.1g}"
    words = {
        "fixed": f"{spectrum.dimension} leading eigenvalue(s) {leading}, semisimple, {gap}",
        "rotating": f"leading eigenvalues {leading} +- {frequencies}, semisimple: no pointwise limit",
        "jordan": f"Jordan block of index {spectrum.index} at {leading}: tokens approach like 1/t",
        "stationary": f"M = {leading} I to {threshold:.1g}: every direction is stationary",
    }[spectrum.case]
    if not is_singular:
        return words
    if case == "undefined" and spectrum.case == "jordan":
        return "G is singular and a rotating Jordan block leads at 0: nothing is derived for it"
    if case == "undefined":
        words = f"the leading real part {spectrum.leading:.3g} <= 0"
        return f"G is singular and {words}: tokens run into ker G in finite time"
    if spectrum.case == "jordan" and abs(spectrum.leading) <= threshold:
        words = f"Jordan block of index {spectrum.index} at 0: tokens approach ker G exponentially, or like 1/t off it"
    return f"G is singular: undefined on ker G; outside it, {words}"


def why_nonlinear(attention: Attention, support: Support) -> str:
    """Why the flow at zero temperature is not linear."""
    reasons = ["several heads"] if attention.heads > 1 else []
    reasons += ["a query bias"] if is_nonzero(attention.G_bias) else []
    reasons += ["a value bias"] if is_nonzero(attention.value_bias) else []
    other = "tokens attend to the moving cloud" if isinstance(support, str) else "the support is no centred ellipsoid"
    return f"{' and '.join(reasons) or other}: the flow is not linear, and limits are certified token by token"
