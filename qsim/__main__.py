"""`python -m qsim`, where the command itself is not on the path."""

import sys

from qsim.cli import main

sys.exit(main())
