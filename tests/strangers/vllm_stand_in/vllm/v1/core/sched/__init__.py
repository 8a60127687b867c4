"""A package of the engine."""
