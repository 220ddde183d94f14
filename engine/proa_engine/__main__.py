"""`python -m proa_engine`: the same as `proa-engine`, found by whoever knows only the interpreter."""

import sys

from proa_engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
