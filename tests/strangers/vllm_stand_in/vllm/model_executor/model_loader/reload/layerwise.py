"""Other weights for a model that is loaded: what stands around its loading."""

from typing import Any


def initialize_layerwise_reload(model: Any) -> None:
    assert not getattr(model, "is_reloading", False)
    model.is_reloading = True


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    assert model.is_reloading
    model.is_reloading = False
