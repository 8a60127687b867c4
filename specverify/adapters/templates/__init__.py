"""The files that `init-adapter` writes, each an adapter that runs as it stands."""
