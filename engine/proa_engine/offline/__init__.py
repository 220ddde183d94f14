"""The offline `LLM`: generates and pools in this process, with vLLM's names."""
