"""A learner's link whose main thread sits in a C call that nothing interrupts, as a collective does: for test_liveness.py."""

import ctypes
import sys
from pathlib import Path

import common.logs
from services.config import load_config
from services.learner.link import Link


def main() -> None:
    config = load_config(Path(sys.argv[1]), [])
    common.logs.setup("learner", json=True)
    link = Link(config.run, checkpoint_step=0, node_id="stuck")
    with link.waits.named("the work of step 1", on="rank 1", timeout_s=1.0, limit_key="learner.wait_timeout_s"):
        the_collective()


def the_collective() -> None:
    ctypes.CDLL(None).sleep(600)


if __name__ == "__main__":
    main()
