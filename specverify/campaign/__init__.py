"""The campaign: workers search and shrink cases; one process counts verdicts."""
