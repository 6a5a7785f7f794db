"""Converts a GGUF file into a bf16 checkpoint folder, tokenizer and chat template included.

`python -m engine.gguf_convert FILE FOLDER`. Run as a process of its own by `engine.models`. The result is byte-stable: the
dequantisation is plain arithmetic on one tensor at a time, whatever the number of threads.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def convert(gguf: Path, destination: Path) -> None:
    """Write `destination` from `gguf`. Raises what transformers raises."""
    # Everything needed is in the file; a look-up would only wait for a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf} carries no chat template")
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
