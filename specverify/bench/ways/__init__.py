"""The table of attention times that `bench attention` writes."""
