"""torch 2.13.0: on the CPU in bfloat16, a row without a finite number spoils the row before it in `linear`.

Rows of odd width are multiplied in pairs of numbers, the last of them together with the first of the next row, at a
weight of 0; 0 * NaN is NaN. Seen with oneDNN on a processor with AMX, from 18 rows on, in no other dtype. Found by
attention.context-exact on rows of padding that hold NaN, as those of a fixed-shape launch may. Exit code 1 where a row
is spoiled, 0 where none is.
"""

import sys

import torch

ROWS, FILLED = 24, 6
rows = torch.ones(ROWS, 11, dtype=torch.bfloat16)
rows[FILLED:] = torch.nan
outputs = torch.nn.functional.linear(rows, torch.ones(16, 11, dtype=torch.bfloat16))
spoiled = [row for row in range(FILLED) if outputs[row].isnan().any()]

print("torch", torch.__version__)
print(f"rows {FILLED} to {ROWS - 1} are NaN; of the others these became NaN: {spoiled}")
sys.exit(int(bool(spoiled)))
