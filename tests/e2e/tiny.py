"""A checkpoint of random weights that can write text: a small Llama, a byte-level vocabulary."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

from tests.models.convert import hf_tensors
from tests.serve.vocabulary import MERGES, SPECIALS

SOURCE = Path(__file__).parent.parent / "golden" / "families" / "llama"


def write_tiny(folder: Path) -> str:
    """Write config, weights and tokenizer; returns the folder as a MODEL argument."""
    alphabet = sorted(ByteLevel.alphabet())
    words = [*SPECIALS, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    vocabulary = {word: index for index, word in enumerate(words)}
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    encoder.pre_tokenizer = ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.add_special_tokens(SPECIALS)
    encoder.save(str(folder / "tokenizer.json"))
    config = json.loads((SOURCE / "config.json").read_text())
    config |= {"vocab_size": len(words), "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(3)
    tensors = hf_tensors(SOURCE / "model.safetensors")
    for name, values in tensors.items():
        if values.shape[0] == 96:  # the rows of the vocabulary
            tensors[name] = rng.normal(size=(len(words), values.shape[1])).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)
