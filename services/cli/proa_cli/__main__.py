"""`python -m proa_cli`."""

import sys

from proa_cli.main import main

sys.exit(main())
