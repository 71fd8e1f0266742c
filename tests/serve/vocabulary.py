"""A byte-level vocabulary of a few hundred tokens, so that the tests need no model."""

from tokenizers.pre_tokenizers import ByteLevel

from headrace.text.tokenizer import Tokenizer, from_gguf

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "h e", "th e", "l o", "i n", "e r", "o n", "Ġ t", "Ġt he", "l l", "H e", "ll o",
          "He llo", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]  # fmt: skip
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small_tokenizer(first: str = SPECIALS[0]) -> Tokenizer:
    """A tokenizer like SmolLM2's: ids 0, 1, 2 are document end, turn start, turn end.
    first: the text of id 0."""
    tokens = [
        first,
        *SPECIALS[1:],
        *sorted(ByteLevel.alphabet()),
        *(m.replace(" ", "") for m in MERGES),
    ]
    return from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": CHATML,
        }
    )
