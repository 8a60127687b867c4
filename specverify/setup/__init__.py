"""The preparations of a run: subjects, selection, processors and environment."""
