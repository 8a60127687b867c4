"""Weight-absorbed attention over latent rows (multi-head latent attention).

After arXiv 2405.04434, section 2.1.2. A latent cache holds one latent vector and one rotated part for each row. The
projections that would expand them are absorbed: the one of keys by the queries, the one of values by the output. All
query heads then share one KV head, whose keys are latent vector and rotated part, and whose values are the latent
vector alone.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.columns import Attend, AttentionInputs


@dataclass(frozen=True, eq=False)
class Absorption:
    """The two halves of the projection that expands latent vectors; see `columns.Absorbed`.

    Attributes:
        module: The attention module of transformers, whose weights are read at each use.
    """

    module: Any

    def queries(self, query: Tensor) -> Tensor:
        """Queries [B, H, T, nope + rotary_dim] as queries of latent rows, [B, H, T, rank + rotary_dim]."""
        nope = self.module.qk_nope_head_dim
        return torch.cat([query[..., :nope] @ self._halves()[0], query[..., nope:]], -1)

    def values(self, latent_output: Tensor) -> Tensor:
        """Mixed latent vectors [B, H, T, rank] as the output of attention, [B, H, T, value_dim]."""
        return latent_output @ self._halves()[1].transpose(-1, -2)

    def _halves(self) -> tuple[Tensor, Tensor]:
        """The projections of keys [H, nope, rank] and of values [H, value_dim, rank]."""
        nope = self.module.qk_nope_head_dim
        by_head: Tensor = self.module.kv_b_proj.weight.unflatten(0, (-1, nope + self.module.v_head_dim))
        return by_head[:, :nope], by_head[:, nope:]


@dataclass(frozen=True)
class OverLatentRows:
    """An attention that is given columns of latent rows as columns of one KV head; other columns pass unchanged.

    Two of them are equal if their attentions are, since recordings of forwards are kept by their attention.

    Attributes:
        attend: The attention.
    """

    attend: Attend

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """See `Attend`."""
        absorption = columns.absorbed
        if absorption is None:
            return self.attend(query, columns, scaling)
        pages = columns.paging
        if pages is not None:
            latent_rows = torch.cat([pages.key_cells, pages.value_cells], -1)
            pages = replace(pages, key_cells=latent_rows, value_cells=pages.key_cells)
        keys = torch.cat([columns.key, columns.value], -1)
        shared = replace(columns, key=keys, value=columns.key, paging=pages, absorbed=None, latent=True)
        return absorption.values(self.attend(absorption.queries(query), shared, scaling))
