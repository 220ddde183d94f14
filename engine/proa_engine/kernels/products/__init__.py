"""Matrix products by number format and number of rows, and low-rank adapters."""
