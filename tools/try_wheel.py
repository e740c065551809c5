"""Whether the wheel in a folder works by itself: it is installed in a new environment and used outside the clone.

    python tools/try_wheel.py build/wheel

The new environment sees the packages of the one that runs this file, so that torch is not installed again; its own
lyapunov_prune comes before theirs. A profile, a removal and the theorems cover what is no Python in the wheel.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

# A model and a tokenizer of a few kilobytes; what is imported has to be the wheel's.
TINY = """
import lyapunov_prune, sys
assert lyapunov_prune.__file__.startswith(sys.prefix), lyapunov_prune.__file__
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
letters = pre_tokenizers.ByteLevel.alphabet()
tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("tiny")
sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=4, **sizes)).save_pretrained("tiny")
"""
TEXT = ["--tokens", "64", "--context", "32"]
COMMANDS = (
    ["--help"],
    ["theorems"],
    ["profile", "tiny", "--seeds", "1", "-o", "run", *TEXT],
    ["rank", "run/profile.json", "--criterion", "bi", "--remove", "1"],
    ["prune", "tiny", "--what", "attention", "--layers", "1", "-o", "small", *TEXT],
    ["eval", "small", "--against", "tiny", "-o", "run", *TEXT],
)


def main(folder: Path) -> None:
    (wheel,) = folder.resolve().glob("*.whl")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        venv.create(place / "env", with_pip=False)
        paths = sysconfig.get_paths(vars={"base": str(place / "env"), "platbase": str(place / "env")})
        own, binaries = Path(paths["purelib"]), Path(paths["scripts"])
        (own / "packages.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
        python = binaries / "python"
        install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--ignore-installed"]
        subprocess.run([sys.executable, *install, str(wheel)], check=True)
        run = place / "elsewhere"
        run.mkdir()
        subprocess.run([python, "-c", TINY], cwd=run, check=True)
        for command in COMMANDS:
            done = subprocess.run([binaries / "lyapunov-prune", *command], cwd=run, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"lyapunov-prune {' '.join(command)} of the wheel: {done.returncode}\n{done.stderr}")
            print(f"lyapunov-prune {' '.join(command)}: done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
