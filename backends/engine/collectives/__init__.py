"""The collectives of ranks, and the functions of a sharded target that call them."""
