"""Pretraining language models with multi-token prediction (MTP), in JAX."""
