"""Run `proa-engine` as `python -m proa_engine`."""

import sys

from proa_engine.cli import main

sys.exit(main())
