"""Sampled drafting and acceptance, batched: coins, laws, drawn children, rules, whole rounds on tables."""
