"""Recorders of verify forwards for devices that have no CUDA graphs."""
