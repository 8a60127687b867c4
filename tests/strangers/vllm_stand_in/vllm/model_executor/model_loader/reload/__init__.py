"""Loading of models."""
