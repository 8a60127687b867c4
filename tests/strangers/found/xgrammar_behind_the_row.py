"""xgrammar 0.2.8 on a CPU: a mask that leaves every token legal bans the first token of the next row.

Where the bits behind the vocabulary are 0, as llguidance leaves them, the function looks for the first bit that is 0
and writes there: one number behind the row. Behind the last row it writes into memory that is not its own. Found by
lossless.logprobs in vllm 0.32.0 with llguidance's masks and drafted tokens. Exit code 1 where the row behind the masked
one changes, 0 otherwise.
"""

import sys
from importlib.metadata import version

import torch
import xgrammar

VOCABULARY = 17

if __name__ == "__main__":
    rows = torch.ones(2, VOCABULARY)
    every_token = torch.tensor([[(1 << VOCABULARY) - 1]], dtype=torch.int32)
    xgrammar.apply_token_bitmask_inplace(rows[:1], every_token)
    banned = [torch.isinf(row).nonzero().flatten().tolist() for row in rows]
    print("xgrammar", version("xgrammar"), f"bans {banned[0]} in the masked row and {banned[1]} in the one behind it")
    sys.exit(int(banned[1] != []))
