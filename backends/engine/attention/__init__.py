"""The attention implementations of the engine, and the visibility of rows."""
