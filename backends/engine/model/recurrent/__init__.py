"""Layers with a recurrent state over trees: one file for each kind of layer."""
