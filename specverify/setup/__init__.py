"""The preparations of a run before its first case: subjects, selection, devices and environment."""
