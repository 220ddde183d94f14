"""The worker: one rank's device, model, KV cache and batch."""
