"""The Ascend operators, emulated on the CPU by their documented contract.

`rules.json` holds the contract, one rule with its source per entry.
"""
