"""Reactions as graphs and the encoder whose tokens are their atoms: chytorch-rxnmap, two blocks fired eight times each.

The first block moves the atoms of one molecule, with a bias by their distance in bonds; the second moves all atoms of
the reaction, without any position: there tokens are exchangeable and the weights never change, as in the theory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PERIODIC = """
H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr
Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir
Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl
Mc Lv Ts Og
"""  # the symbols of all elements, in their order
NUMBER = {symbol: i + 1 for i, symbol in enumerate(PERIODIC.split())}
VALENCES = {"B": (3,), "C": (4,), "N": (3, 5), "O": (2,), "P": (3, 5), "S": (2, 4, 6)} | dict.fromkeys(
    ("F", "Cl", "Br", "I"), (1,)
)
ORDER = {"-": 1, "/": 1, "\\": 1, "=": 2, "#": 3, "$": 4, ":": 1, "~": 1}
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOPSFI]|[bcnops]|%\d\d|\d|[-/\\=#$:~()]")
BRACKET = re.compile(r"\[\d*(?P<symbol>[A-Z][a-z]?|[a-z]{1,2})@{0,2}(?:H(?P<H>\d*))?[+-]*\d*(?::\d+)?\]")

FARTHEST, MOST_NEIGHBOURS = 10, 14  # distances and numbers of neighbours are counted up to these
REACTANT, PRODUCT = 2, 3  # rows of the table of roles; 1 is the reaction itself


@dataclass(frozen=True, eq=False)
class Molecule:
    """atoms (n,): atomic numbers. neighbours (n,): of each, hydrogens included. distance (n, n): in bonds."""

    atoms: Tensor
    neighbours: Tensor
    distance: Tensor


def molecule(smiles: str) -> Molecule:
    """The graph that a SMILES of one molecule writes down; charges, isotopes and handedness are left out.

    Example:
        >>> molecule("CC=O").neighbours  # three, one and no hydrogens
        tensor([4, 3, 1])
    """
    parts = TOKEN.findall(smiles)
    if not parts or "".join(parts) != smiles:
        raise ValueError(f"{smiles!r} is no SMILES of one molecule; expected atoms, bonds, rings and branches.")
    atoms: list[tuple[str, bool, int | None]] = []  # symbol, aromatic, hydrogens if they are written
    bonds: list[tuple[int, int, int]] = []
    branches: list[int] = []
    rings: dict[str, tuple[int, str]] = {}
    last, bond = -1, ""
    for part in parts:
        if last < 0 and (part in ORDER or part in "()" or part.strip("%").isdigit()):
            raise ValueError(f"{smiles!r} begins with {part}, expected an atom.")
        if part == "(":
            branches.append(last)
        elif part == ")":
            if not branches:
                raise ValueError(f"{smiles!r} closes a branch that it does not open.")
            last = branches.pop()
        elif part in ORDER:
            bond = part
        elif part.strip("%").isdigit():
            ring = part.strip("%")
            if ring in rings:
                start, written = rings.pop(ring)
                bonds.append((start, last, ORDER.get(bond or written, 1)))
            else:
                rings[ring] = (last, bond)
            bond = ""
        else:
            atoms.append(_atom(part, smiles))
            if last >= 0:
                bonds.append((last, len(atoms) - 1, ORDER.get(bond, 1)))
            last, bond = len(atoms) - 1, ""
    if rings or branches or bond:
        raise ValueError(f"{smiles!r} leaves a ring, a branch or a bond open.")
    n = len(atoms)
    adjacent = torch.zeros(n, n, dtype=torch.bool)
    degree, order = [0] * n, [0] * n
    for i, j, size in bonds:
        adjacent[i, j] = adjacent[j, i] = True
        for end in (i, j):
            degree[end] += 1
            order[end] += size
    hydrogens = [_hydrogens(*atom, order[i]) for i, atom in enumerate(atoms)]
    return Molecule(
        torch.tensor([NUMBER[symbol] for symbol, _, _ in atoms]),
        torch.tensor(degree) + torch.tensor(hydrogens),
        _distances(adjacent),
    )


def count_atoms(reaction: str) -> int:
    """The number of atoms on both sides of a reaction."""
    return sum(len(molecule(part).atoms) for part in reaction.replace(">>", ".").split("."))


def _atom(part: str, smiles: str) -> tuple[str, bool, int | None]:
    written = None
    symbol = part
    if part.startswith("["):
        match = BRACKET.fullmatch(part)
        if not match:
            raise ValueError(f"{part} in {smiles!r} is no atom, expected such as [nH], [Na+] or [C@@H].")
        symbol, H = match["symbol"], match["H"]
        written = 0 if H is None else int(H or 1)
    name = symbol.capitalize()
    if name not in NUMBER:
        raise ValueError(f"{part} in {smiles!r} is no chemical element.")
    return name, symbol.islower(), written


def _hydrogens(symbol: str, aromatic: bool, written: int | None, order: int) -> int:
    """Hydrogens of an atom whose bonds have this total order: written in brackets, else what its valence leaves."""
    if written is not None:
        return written
    if aromatic:  # each bond in the ring counted one, and the ring has an electron of the atom
        return max(0, VALENCES[symbol][0] - order - 1)
    return next((valence - order for valence in VALENCES[symbol] if valence >= order), 0)


def _distances(adjacent: Tensor) -> Tensor:
    """Shortest paths (n, n) of a connected graph."""
    n = len(adjacent)
    distance = torch.full((n, n), n)
    reached = torch.eye(n, dtype=torch.bool)
    for steps in range(n):
        distance[reached & (distance == n)] = steps
        reached = reached | (reached.float() @ adjacent.float() > 0)
    return distance


class ReactionEncoder(nn.TransformerEncoder):
    """chytorch-rxnmap: one post-norm block, d = 1024, 4 heads, fired 8 times on the atoms of a reaction, no positions.

    `atoms` makes tokens of a reaction SMILES: a token for the reaction, then one for each atom, as a second block,
    fired as often on every molecule by itself, left it. The forward pass takes them as `src` (batch, tokens, d).
    firings: of each block; more is beyond the trained depth.

    Example:
        >>> model = ReactionEncoder(firings=2, dim=16, heads=2, molecule_heads=2, hidden=32).eval()
        >>> tuple(model(model.atoms("CO.CC(=O)Cl>>CC(=O)OC")[None]).shape)  # 6 + 5 atoms
        (1, 12, 16)
    """

    def __init__(
        self, firings: int = 8, dim: int = 1024, heads: int = 4, molecule_heads: int = 16, hidden: int = 3072
    ) -> None:
        layer = nn.TransformerEncoderLayer(dim, heads, hidden, dropout=0.0, activation="gelu", batch_first=True)
        super().__init__(layer, 1, enable_nested_tensor=False)
        self.layers = nn.ModuleList([layer] * firings)
        self.num_layers, self.molecule_firings = firings, min(firings, 8)
        self.molecule_layer = nn.TransformerEncoderLayer(
            dim, molecule_heads, hidden, dropout=0.0, activation="gelu", batch_first=True
        )
        self.elements = nn.Embedding(len(NUMBER) + 3, dim, padding_idx=0)
        self.neighbours = nn.Embedding(MOST_NEIGHBOURS + 3, dim, padding_idx=0)
        self.distances = nn.Embedding(FARTHEST + 2, molecule_heads)  # to the molecule's own token, then by bonds
        self.roles = nn.Embedding(4, dim, padding_idx=0)

    def atoms(self, smiles: str) -> Tensor:
        """Tokens (1 + atoms, d) of a reaction "A.B>>C"; what stands between the arrows is left out."""
        sides = smiles.split(">")
        if len(sides) != 3 or not sides[0] or not sides[2]:
            raise ValueError(f"{smiles!r} is no reaction, expected reactants>>products, molecules with a dot between.")
        tokens = [self.roles.weight[1][None]]
        for role, side in ((REACTANT, sides[0]), (PRODUCT, sides[2])):
            for part in side.split("."):
                tokens.append(self._molecule(molecule(part)) + self.roles.weight[role])
        return torch.cat(tokens)

    def _molecule(self, graph: Molecule) -> Tensor:
        """The atoms (n, d) of one molecule after the firings of its block, beside a token for the molecule."""
        n = len(graph.atoms)
        device = self.roles.weight.device
        x = self.elements(torch.cat([torch.tensor([1]), graph.atoms + 2]).to(device))
        # The token of the molecule has no neighbours, the padding's row.
        counted = torch.cat([torch.tensor([0]), graph.neighbours.clamp_max(MOST_NEIGHBOURS) + 2]).to(device)
        x = x + self.neighbours(counted)
        distance = torch.zeros(n + 1, n + 1, dtype=torch.long)
        distance[1:, 1:] = graph.distance.clamp_max(FARTHEST) + 1
        bias = self.distances(distance.to(device)).movedim(-1, 0)  # (heads, n + 1, n + 1)
        for _ in range(self.molecule_firings):
            x = _fired(self.molecule_layer, x, bias)
        return x[1:]


def _fired(layer: nn.TransformerEncoderLayer, x: Tensor, bias: Tensor) -> Tensor:
    """Tokens x (n, d) after a post-norm layer, bias (heads, n, n) added to its logits.

    By hand: without gradients torch 2.13 takes a path in which such a mask gives NaN.
    """
    attention = layer.self_attn
    qkv = nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = qkv.unflatten(-1, (3, attention.num_heads, -1)).permute(1, 2, 0, 3)
    heads = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias[None])[0]
    y = layer.norm1(x + attention.out_proj(heads.transpose(0, 1).flatten(1)))
    return layer.norm2(y + layer.linear2(layer.activation(layer.linear1(y))))
