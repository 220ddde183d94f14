"""The engine core: who computes what in each step. Standard library only; knows nothing of tensors, text or RPC."""
