"""The engine's gRPC server."""
