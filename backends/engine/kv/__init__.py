"""The KV caches of the engine, one file per layout.

All of them implement the interface in `backends/engine/kv/base.py`. The arena makes them and takes them back.
"""
