"""On the PYTHONPATH of a vLLM without a GPU, with TRITON_INTERPRET=1: Triton's own interpreter stands for a CPU backend.

vLLM tells which experts it chose from its second model runner alone, whose kernels are written in Triton, and Triton as it is on the
package index has backends for GPUs only. Interpreted, those kernels run on a CPU, slowly. For measurements and tests of that runner:
``bench.moe_routing`` and ``tests/integration/test_vllm_moe.py``. vLLM's processes inherit the PYTHONPATH, so that it works in all.
"""

import importlib.abc
import importlib.util
import sys
from types import SimpleNamespace


class _Backends(importlib.abc.MetaPathFinder):
    """Lets ``triton.backends`` load, and then puts one in place of all that it found."""

    def find_spec(self, name, path, target=None):
        if name != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.backends.clear()
            module.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Backends())
