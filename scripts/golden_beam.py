"""Write tests/golden/beams.json: beam search of `transformers` on the tiny Llama checkpoint.

Needs torch and transformers, in an environment of its own:  python scripts/golden_beam.py
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
MODEL = GOLDEN / "families" / "llama"


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    cases = []
    generator = torch.Generator().manual_seed(5)
    for width, penalty, tokens, early, length in (
        (4, 1.0, 12, False, 5),
        (4, 0.0, 16, False, 9),
        (4, 2.0, 16, False, 17),
        (3, 1.0, 10, True, 33),
        (2, -1.0, 8, False, 1),
        (1, 1.0, 8, False, 6),
    ):
        prompt = torch.randint(3, model.config.vocab_size, (1, length), generator=generator)
        # a frequent token as the end, so that beams do finish
        with torch.no_grad():
            greedy = model.generate(
                prompt, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, length:]
        stop = int(greedy[len(greedy) // 2])
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            length_penalty=penalty,
            early_stopping=early,
            eos_token_id=stop,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        sequences = []
        for row in found.sequences[:, length:].tolist():
            if stop in row:
                row = row[: row.index(stop) + 1]
            sequences.append(row)
        scores = getattr(found, "sequences_scores", None)
        cases.append(
            {
                "prompt": prompt[0].tolist(), "width": width, "length_penalty": penalty,
                "max_tokens": tokens, "early_stopping": early, "stop": stop,
                "sequences": sequences,
                "scores": None if scores is None else [round(s, 5) for s in scores.tolist()],
            }
        )  # fmt: skip
    (GOLDEN / "beams.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
