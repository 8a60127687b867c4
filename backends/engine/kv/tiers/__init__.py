"""The second tier of the prefix cache, which keeps pages outside the pool."""
