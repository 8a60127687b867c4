"""The models of the engine: how they are opened, examined and run."""
