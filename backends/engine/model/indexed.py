"""The columns that an indexer chose for the rows of a forward, out of the masks of its layers."""

import torch
from torch import Tensor

from specverify.backends.engine.attention.chosen_columns import ChosenMasks
from specverify.backends.engine.kv.choices import UNKNOWN
from specverify.backends.engine.kv.lanes import BatchCache


def columns_of_rows(lanes: BatchCache, masks: ChosenMasks, layers: int) -> list[list[Tensor]] | None:
    """For each lane and each of its rows the columns of its cache, int64 [layers, k]; None where no layer chose any.

    k is the most columns that the row has in a layer; UNKNOWN stands in layers that chose none.
    """
    if not masks:
        return None
    by_layer = {layer: [lane.cpu() for lane in lanes.logical_masks(layer, mask)] for layer, mask in masks.items()}
    columns = []
    for lane in range(len(lanes.caches)):
        nothing = torch.zeros_like(next(iter(by_layer.values()))[lane])
        # [layers, rows, columns]
        stacked = torch.stack([by_layer[layer][lane] if layer in by_layer else nothing for layer in range(layers)])
        widths = stacked.sum(-1).amax(0).tolist()
        layer_of, row_of, chosen_columns = stacked.nonzero(as_tuple=True)  # by layer, row and column
        ordered = torch.full((layers, len(widths), max(widths, default=0)), UNKNOWN)
        ordered[layer_of, row_of, stacked.cumsum(-1)[layer_of, row_of, chosen_columns] - 1] = chosen_columns
        columns.append([ordered[:, row, :width].clone() for row, width in enumerate(widths)])
    return columns
