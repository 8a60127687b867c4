"""The formulas of a decoder layer: norms and blocks, and rotary positions.

`layer` holds norms and blocks, `rotary` the position embedding; both are written as the papers state them.
"""
