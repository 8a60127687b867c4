"""The engine's models: opened, examined, and run forward over rows with their own mask."""
