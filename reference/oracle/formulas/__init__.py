"""The formulas of a decoder layer, as papers state them: `layer` for norms and blocks, `rotary` for positions."""
