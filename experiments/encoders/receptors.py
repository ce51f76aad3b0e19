"""T-cell receptors and the encoder whose tokens are their amino acids: SCEPTR, three layers of d = 64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
LOOPS = 6  # CDR1, CDR2 and CDR3 of the alpha chain, then of the beta chain
MASK, CLS = 0, 1  # columns of the one-hot vector of a token; the residues follow
FEATURES = 2 + len(RESIDUES) + 1 + LOOPS  # which token, where in its loop, which loop


def count_residues(receptor: str) -> int:
    """The number of amino acids of a receptor."""
    return sum(residue in RESIDUES for residue in receptor)


class ReceptorEncoder(nn.TransformerEncoder):
    """SCEPTR: 3 post-norm layers, d = 64, 8 heads; a token is an amino acid with its loop and its position in the loop.

    `residues` makes tokens of a receptor; the forward pass takes them as `src`, of shape (batch, tokens, d).

    Example:
        >>> model = ReceptorEncoder(layers=1, dim=16, heads=2).eval()
        >>> receptor = "SSVPPY YTSAATLV CAVDNARLMF SGHRS YFSETQ CASSDGSFNEQFF"
        >>> tuple(model(model.residues(receptor)[None]).shape)  # [CLS] and 48 amino acids
        (1, 49, 16)
    """

    def __init__(self, layers: int = 3, dim: int = 64, heads: int = 8) -> None:
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True)
        super().__init__(layer, layers, enable_nested_tensor=False)
        self.embedding = nn.Linear(FEATURES, dim, bias=False)

    def residues(self, receptor: str) -> Tensor:
        """Tokens (1 + amino acids, d) of six loops with spaces between; "-" stands for a loop that is not known."""
        loops = receptor.split()
        if len(loops) != LOOPS:
            raise ValueError(f"{receptor!r} has {len(loops)} loops, expected CDR1, CDR2, CDR3 of alpha, then of beta.")
        rows = [torch.zeros(FEATURES)]
        rows[0][CLS] = 1
        for i, loop in enumerate(loops):
            for position, residue in enumerate(loop if loop != "-" else ""):
                if residue not in RESIDUES:
                    raise ValueError(f"{residue!r} in {receptor!r} is none of the amino acids {RESIDUES}.")
                row = torch.zeros(FEATURES)
                row[2 + RESIDUES.index(residue)] = 1
                row[-LOOPS - 1] = position / (len(loop) - 1) if len(loop) > 1 else 0.5
                row[i - LOOPS] = 1
                rows.append(row)
        return self.embedding(torch.stack(rows).to(self.embedding.weight))
