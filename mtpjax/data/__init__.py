"""Text to batches: sources, tokenizer, pack, batches, in the order the data flows."""
