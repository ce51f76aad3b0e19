"""Tables and the encoder whose tokens are their rows: TabPFN v1, where nothing depends on the order of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 100, 10  # a row as TabPFN takes it: at most so many features, classes 0 to 9


class TableEncoder(nn.TransformerEncoder):
    """TabPFN v1: 12 post-norm layers, d = 512, 4 heads; a token is a row with its label, without a position.

    encoder, y_encoder: the linear maps of features and label, whose sum is a token. decoder: from the last state of a
    row to its class. `rows` makes tokens; the forward pass takes them as `src`, of shape (batch, rows, d).

    Example:
        >>> x, y = draw_table(8, generator=torch.Generator().manual_seed(0))
        >>> model = TableEncoder(layers=1, dim=16, hidden=32).eval()
        >>> tuple(model(model.rows(x, y)[None]).shape)
        (1, 8, 16)
    """

    def __init__(self, layers: int = 12, dim: int = 512, heads: int = 4, hidden: int = 1024) -> None:
        layer = nn.TransformerEncoderLayer(dim, heads, hidden, dropout=0.0, activation="gelu", batch_first=True)
        # Padded rows do not exist here, and the nested tensors made for them are another code path.
        super().__init__(layer, layers, enable_nested_tensor=False)
        self.encoder = nn.Linear(FEATURES, dim)
        self.y_encoder = nn.Linear(1, dim)
        self.decoder = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, CLASSES))

    def rows(self, x: Tensor, y: Tensor) -> Tensor:
        """Tokens (..., n, d) of features x (..., n, at most 100), standardised by column here, and classes y (..., n).

        Of used features each counts 100 / used, as in training; the rest are zero.
        """
        used = x.shape[-1]
        if not 1 <= used <= FEATURES or y.shape != x.shape[:-1] or y.shape[-1] < 2:
            raise ValueError(
                f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}, expected (..., n, features) and (..., n) with "
                f"at least 2 rows and 1 to {FEATURES} features."
            )
        z = (x - x.mean(-2, keepdim=True)) / (x.std(-2, keepdim=True) + 1e-6)
        z = nn.functional.pad(z.clip(-100, 100) * FEATURES / used, (0, FEATURES - used))
        dtype = self.encoder.weight.dtype
        return self.encoder(z.to(dtype)) + self.y_encoder(y.to(dtype).unsqueeze(-1))


def draw_table(
    n: int, features: int = 10, classes: int = 3, spread: float = 1.5, *, centres: int = 0, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """n independent rows of one distribution: a class at random, features normal around its centre.

    n: rows. features, classes: of the table. spread: of the centres, in units of the noise. centres: a seed of the
    centres, and so of the distribution, whatever the generator. generator: of the rows.

    Returns x (n, features) and y (n,), the classes as floats.

    Example:
        >>> x, y = draw_table(5, generator=torch.Generator().manual_seed(0))
        >>> tuple(x.shape), tuple(y.shape)
        ((5, 10), (5,))
    """
    means = spread * torch.randn(classes, features, generator=torch.Generator().manual_seed(centres))
    y = torch.randint(classes, (n,), generator=generator)
    return means[y] + torch.randn(n, features, generator=generator), y.float()
