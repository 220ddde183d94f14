"""The engine's gRPC server: everything between the wire and the core."""
