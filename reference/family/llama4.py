"""Llama 4's text model with dense layers (transformers `models/llama4`).

The norm of queries and keys has no gain.
"""

from reference.family.base import Family

LLAMA4 = Family("llama4", query_key_gains=False)
