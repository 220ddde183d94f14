"""What lies in a rank's memory, and how much: KV cache, host arena, mover."""
