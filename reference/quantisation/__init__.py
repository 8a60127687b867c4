"""Quantisation: the written rules for weights of few bits, one file each."""
