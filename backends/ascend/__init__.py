"""Ascend: the documented contract of its operators, an emulation of it on the CPU, and attention that calls them."""
