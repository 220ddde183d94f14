"""How Proa's built-in model is made: text, tokenizer, training, export and evaluation."""
