"""The first minutes on a new machine, in parts that are written as they end."""
