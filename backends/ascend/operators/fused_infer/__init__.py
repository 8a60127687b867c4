"""Fused-infer attention: with a batch axis, ragged, and over latent rows."""
