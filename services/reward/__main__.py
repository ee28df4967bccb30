"""``python -m services.reward --config FILE`` is ``forebay reward --config FILE``."""

import sys

from services.cli import main

sys.exit(main(["reward", *sys.argv[1:]]))
