"""Live sessions: Hypothesis plays actions, and each action is checked at once."""
