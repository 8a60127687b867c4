"""What a run needs before its first case: plan, subjects, selection, devices and environment."""
