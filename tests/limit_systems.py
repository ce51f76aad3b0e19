"""Recordings of given tokens and weights: systems in which the theorem holds, false laws, and planted displacements."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from attn_flow import Attention, flow
from attn_flow.hooks.demo import minilm, topics
from attn_flow.measures.cloud import Cloud
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.recording import Recording


def recording_of(
    attentions: list[Attention], states: list[list[Tensor]], special: list[Tensor] | None = None
) -> Recording:
    """A recording of states [level][text] under given attentions; without `special` no token is special."""
    L, texts = len(attentions), len(states[0])
    outputs = [[A.drift(x) for x in level] for A, level in zip(attentions, states)]
    special = special or [torch.zeros(len(x), dtype=torch.bool) for x in states[0]]
    tokens = [["token"] * len(x) for x in states[0]]
    return Recording(attentions, [None] * L, [None] * L, states, outputs, special, tokens, list(range(texts)))


def theorem_system(seed: int, d: int, horizon: float, n: int = 400) -> Recording:
    """Eight clouds on the sphere that follow one cold head up to half of t_min.

    G and V are symmetric with random eigenvectors, beta is the largest that n tokens resolve, of order n^(2/(d - 1)),
    and t_min = log(beta)/(2 g) with the rate g = (lambda_1 - lambda_2)/|G e_1|, e_1 the leading eigenvector of V G.
    """
    g = torch.Generator().manual_seed(seed)
    rotation = lambda: torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64))[0]
    G, V = (R @ torch.diag(torch.linspace(0.5, 2.0, d).double()) @ R.mT for R in (rotation(), rotation()))
    beta = min(20.0, 0.75 * n ** (2 / (d - 1)))
    values, vectors = torch.linalg.eig(V @ G)  # real: a product of two positive matrices
    order = values.real.argsort(descending=True)
    rate = (values.real[order[0]] - values.real[order[1]]) / (G @ vectors[:, order[0]].real).norm()
    depth = max(1, min(4, int(math.log(beta) / (4 * rate) / horizon)))
    attention = Attention.from_matrices(G, V, beta=beta)
    x = torch.randn(8, n, d, generator=g, dtype=torch.float64)
    path = flow(attention, x, t=horizon * torch.arange(depth + 1))
    recording = recording_of([attention] * depth, [list(level) for level in path.x])
    return replace(recording, horizon=horizon, steps=8)


def compressed_minilm(dimension: int = 32, heads: int = 4, texts: int = 8, length: int = 48) -> Recording:
    """MiniLM in the leading principal directions of its tokens with a few heads: real displacements and weights."""
    pages = [text for text in topics() if len(text) > 900][:texts]
    full = record_encoder(*minilm(), pages, max_length=length)
    second_moment = sum(x.double().mT @ x.double() for level in full.states for x in level)
    P = torch.linalg.eigh(second_moment)[1][:, -dimension:].mT
    attentions = []
    for A in full.attentions:
        Q, K, V, O = (getattr(A, name)[:heads].double() for name in "QKVO")
        attentions.append(Attention(Q @ P.mT, K @ P.mT, V @ P.mT, P @ O, beta=A.beta))
    return recording_of(attentions, [[x.double() @ P.mT for x in level] for level in full.states])


def permuted_heads(recording: Recording, g: torch.Generator) -> Recording:
    """Queries and keys of every layer stand with the values of random other heads."""
    attentions = []
    for A in recording.attentions:
        order = torch.randperm(A.heads, generator=g)
        attentions.append(replace(A, Q=A.Q[order], K=A.K[order]))
    return replace(recording, attentions=attentions)


def other_layers(recording: Recording, g: torch.Generator) -> Recording:
    """Every layer has the weights of another one, at random."""
    L = recording.layers
    order = torch.arange(L)
    while bool((order == torch.arange(L)).any()):
        order = torch.randperm(L, generator=g)
    return replace(recording, attentions=[recording.attentions[i] for i in order])


def untrained(recording: Recording, g: torch.Generator) -> Recording:
    """Normal random weights of the same shapes and sizes."""
    draw = lambda W: W.std() * torch.randn(W.shape, generator=g, dtype=W.dtype)
    attentions = [replace(A, **{name: draw(getattr(A, name)) for name in "QKVO"}) for A in recording.attentions]
    return replace(recording, attentions=attentions)


def principal_component(recording: Recording, g: torch.Generator) -> Recording:
    """The leading principal component of a random six of the texts as the law of every layer."""
    attentions = []
    for level in recording.states[:-1]:
        chosen = torch.randperm(len(level), generator=g)[:6].tolist()
        cov = Cloud(torch.cat([level[t] for t in chosen])).moments()[1]
        v = torch.linalg.eigh(cov)[1][:, -1:]
        attentions.append(Attention.from_matrices(v @ v.mT, v @ v.mT, beta=0.1 + float(torch.rand((), generator=g))))
    return replace(recording, attentions=attentions)


def planted(recording: Recording, g: torch.Generator, size: float) -> Recording:
    """The displacement of every layer turned at random, plus M x, whose size is `size` times the displacement's."""
    states = [recording.states[0]]
    for l, A in enumerate(recording.attentions):
        x, d = torch.cat(states[-1]), A.dim
        shift = torch.cat(recording.states[l + 1]) - torch.cat(recording.states[l])
        R = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=x.dtype))[0]
        M = sum(float(A.beta) * A.OV[h] @ Cloud(x).moments()[1] @ A.G[h] for h in range(A.heads))
        added = x @ M.mT
        after = x + shift @ R.mT + size * shift.square().mean().sqrt() / added.square().mean().sqrt() * added
        norms = torch.cat(recording.states[l + 1]).norm(dim=-1, keepdim=True)
        after = after / after.norm(dim=-1, keepdim=True) * norms
        states.append(list(after.split([len(z) for z in states[-1]])))
    return replace(recording, states=states)


FALSE_LAWS = {
    "queries and keys of other heads": permuted_heads,
    "weights of another layer": other_layers,
    "weights of an untrained copy": untrained,
    "leading principal component of the tokens": principal_component,
}
