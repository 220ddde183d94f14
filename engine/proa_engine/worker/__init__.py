"""The worker: one rank's device, model, KV cache and batch. Knows nothing of scheduling or of who sends it plans."""
