"""The families whose layers are Llama's.

Their layers have two norms with gains around 1, and `Architecture` has a field for each of their settings.
"""

from reference.family.base import Family

LLAMA = Family("llama")
PANGU = Family("pangu")
QWEN2 = Family("qwen2")
QWEN3 = Family("qwen3")
MISTRAL = Family("mistral")
