"""Training of the built-in model: text, tokenizer, training, export and evaluation."""
