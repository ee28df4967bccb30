"""The folder of vLLM's sockets: removed by its owner, or after a kill by the next node, and by nobody while its owner lives."""

import os
import subprocess
import sys
import tempfile

from services.rollout.vllm_sockets import SocketFolder


def test_orphans_are_removed_and_living_folders_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    killed = (
        "import os; from services.rollout.vllm_sockets import SocketFolder; f = SocketFolder(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", killed], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert len(list(tmp_path.iterdir())) == 1, "a killed process leaves its folder"
    first = SocketFolder()
    assert list(tmp_path.iterdir()) == [first.path]
    second = SocketFolder()
    assert set(tmp_path.iterdir()) == {first.path, second.path}
    assert os.environ["VLLM_RPC_BASE_PATH"] == str(second.path)
    first.close()
    second.close()
    assert not list(tmp_path.iterdir())
