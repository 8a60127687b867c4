"""Draft forwards of a batch, over persistent buffers padded to captured sizes."""
