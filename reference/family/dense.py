"""The families whose layers are Llama's: two norms, gains around 1, and settings that `Architecture` has for all."""

from reference.family.base import Family

LLAMA = Family("llama")
PANGU = Family("pangu")
QWEN2 = Family("qwen2")
QWEN3 = Family("qwen3")
MISTRAL = Family("mistral")
