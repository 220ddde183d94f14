"""HTTP itself: the server's protocol, bodies, errors, streams of events."""
