"""The engine core: schedules requests and KV cache blocks. Imports the standard library and `proa.contract` only."""
