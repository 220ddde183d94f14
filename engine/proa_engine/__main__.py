"""`python -m proa_engine` is `proa-engine`."""

import sys

from proa_engine.cli import main

sys.exit(main())
