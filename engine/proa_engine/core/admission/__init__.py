"""From an added request to a running one: validation, queue, table of requests."""
