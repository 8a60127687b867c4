"""Tools for an adapter's author: the commands `init-adapter` and `check-adapter`."""
