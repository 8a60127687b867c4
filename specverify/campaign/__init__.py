"""The campaign: workers search, shrink and replay cases, and one process counts what they tell."""
