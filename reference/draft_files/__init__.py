"""Draft heads in published directories, read into words and weights.

The layouts are those of SafeAILab (EAGLE-1, EAGLE-3), speculators (both), SpecForge and SGLang, vLLM, FasterDecoding's
Medusa and DeepSeek's MTP modules inside a target's checkpoint. Implementations disagree on some fields; a head that
they would run in different ways, and whose files do not say which is meant, is refused. Pickle is never opened.
"""

from specverify.reference.draft_files.open_head import OpenedHead, open_head, stored_head
from specverify.reference.draft_files.target_sizes import TargetSizes, target_sizes

__all__ = ["OpenedHead", "TargetSizes", "open_head", "stored_head", "target_sizes"]
