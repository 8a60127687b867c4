"""What may be drawn (strategies), what must hold (invariants), and how a verdict is reached; no torch, no prose."""
