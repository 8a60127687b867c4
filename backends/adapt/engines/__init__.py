"""Ready adapters: engines of others as backends, one file an engine.

`backends/adapters.py` has their rows. A file here is imported only when one of its backends is opened, so that it may
import its engine at the top.
"""
