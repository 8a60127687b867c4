"""Live sessions: Hypothesis plays actions, and every action is watched."""
