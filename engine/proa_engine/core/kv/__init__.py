"""The KV cache: blocks, tables, state slots, the prefix cache, and the tiers behind it."""
