"""`python -m proa_gateway`: the command line."""

from proa_gateway.cli import main

main()
