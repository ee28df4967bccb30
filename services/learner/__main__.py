"""``python -m services.learner --config FILE`` is ``forebay learner --config FILE``."""

import sys

from services.cli import main

sys.exit(main(["learner", *sys.argv[1:]]))
