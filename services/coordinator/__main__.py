"""``python -m services.coordinator --config FILE`` is ``forebay coordinator --config FILE``."""

import sys

from services.cli import main

sys.exit(main(["coordinator", *sys.argv[1:]]))
