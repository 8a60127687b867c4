"""Other weights for a model that is loaded."""

from collections.abc import Iterable
from typing import Any

from vllm.faults import has_fault


def reload_weights(
    vllm_config: Any,
    model: Any,
    weights_iterator: Iterable[tuple[str, Any]] | None,
    weights_path: str | None,
    is_checkpoint_format: bool,
) -> None:
    assert weights_iterator is not None
    assert weights_path is None
    assert is_checkpoint_format
    weights = dict(weights_iterator)
    if not has_fault("reloads-nothing"):
        model.load_state_dict(weights, strict=False)
