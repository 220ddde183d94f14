"""Other formats of tokenizers, converted to tokenizer.json in memory."""
