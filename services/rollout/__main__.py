"""``python -m services.rollout --config FILE`` is ``forebay rollout --config FILE``."""

import sys

from services.cli import main

sys.exit(main(["rollout", *sys.argv[1:]]))
