"""python -m paceline, and torchrun -m paceline."""

import sys

from paceline.cli import main

sys.exit(main())
