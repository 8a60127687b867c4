"""How the time of forwards grows, and the oracle's beside transformers'."""
