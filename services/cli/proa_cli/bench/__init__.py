"""`proa bench`: measures a server over HTTP, or the engine in this process, with vLLM's flags and results."""
