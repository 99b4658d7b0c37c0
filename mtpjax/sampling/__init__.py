"""Decoding: filters, the rules that accept drafts, and the loop that holds them."""
