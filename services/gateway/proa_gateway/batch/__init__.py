"""`proa-gateway run-batch`: the requests of a file, sent to a gateway, and a file with their responses."""
