"""SGLang's native `/generate`: prompts are texts or token ids, and each has a response of its own."""
