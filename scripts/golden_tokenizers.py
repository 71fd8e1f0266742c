"""Write tests/golden/tokenizers.json: what the families' reference tokenizers make of 2,000 texts.

Run with a Python that has transformers, sentencepiece and regex: python
scripts/golden_tokenizers.py References: the classes of transformers where it has them,
sentencepiece itself for scored pieces, else the published splitting expression in the `regex`
module with a textbook BPE. The vocabularies are small ones trained here.
"""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import regex
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CohereTokenizer, GPT2Tokenizer, Qwen2Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.text.oracle import merge, spell  # noqa: E402
from tests.text.texts import SNIPPETS, digest, varied_texts  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
COUNT = 2000
# With a prefix the families have none; without, runs of line ends and spaces as Gemma has.
USER_DEFINED: dict[bool, list[str]] = {True: [], False: ["<turn>", "\n\n", "\u2581\u2581"]}
WORDS3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> list[str]:
    english = (GOLDEN / "english.txt").read_text("utf-8")
    return [*english.splitlines(), *SNIPPETS * 20, *varied_texts(500, seed=99)]


def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def with_regex(
    pattern: str, tokens: list[str], merges: list[str], whole: bool
) -> Callable[[str], list[int]]:
    """The published expression and a textbook BPE; whole: a word that is a token is not merged."""
    ids = {token: index for index, token in enumerate(tokens)}
    ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
    cut = regex.compile(pattern)

    def encode(text: str) -> list[int]:
        result = []
        for word in cut.findall(text):
            symbols = spell(word)
            if whole and "".join(symbols) in ids:
                result.append(ids["".join(symbols)])
            else:
                result += [ids[symbol] for symbol in merge(symbols, ranks)]
        return result

    return encode


def byte_level() -> dict[str, Any]:
    tokens, merges = trained()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(pair.split(" ")) for pair in merges]
    classes = {"gpt-2": GPT2Tokenizer, "qwen2": Qwen2Tokenizer, "command-r": CohereTokenizer}
    encoders: dict[str, Callable[[str], list[int]]] = {}
    for name, kind in classes.items():
        tokenizer = kind(vocab=vocabulary, merges=pairs)
        encoders[name] = lambda text, t=tokenizer: t.encode(text, add_special_tokens=False)
    encoders["llama-bpe"] = with_regex(WORDS3, tokens, merges, whole=True)
    encoders["dbrx"] = with_regex(WORDS3, tokens, merges, whole=False)
    encoders["tekken"] = with_regex(TEKKEN, tokens, merges, whole=True)
    encoders["gpt-4o"] = with_regex(GPT4O, tokens, merges, whole=False)
    texts = varied_texts(COUNT, seed=7)
    digests = {
        name: "".join(digest(encode(text)) for text in texts) for name, encode in encoders.items()
    }
    return {"tokens": tokens, "merges": merges, "digests": digests}


def scored_pieces(prefix: bool) -> dict[str, Any]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
        user_defined_symbols=USER_DEFINED[prefix],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces, scores, types = [], [], []
    for token in range(processor.get_piece_size()):
        piece = processor.id_to_piece(token)
        kind = 1
        if processor.is_unknown(token):
            kind = 2
        elif processor.is_control(token):
            kind = 3
        elif processor.is_byte(token):
            kind = 6
        elif piece in USER_DEFINED[prefix]:
            kind, piece = 4, piece.replace("\u2581", " ")
        pieces.append(piece)
        scores.append(float(processor.get_score(token)))
        types.append(kind)
    texts = varied_texts(COUNT, ("<turn>", "\n\n\n"), seed=8)
    return {
        "tokens": pieces,
        "scores": scores,
        "token_type": types,
        "digests": "".join(digest(processor.encode(text)) for text in texts),
        "decoded": [
            [ids, processor.decode(ids)]
            for ids in ([300, 301], [400, 3, 500], [processor.bos_id(), 350], [320] * 3)
        ],
    }


if __name__ == "__main__":
    golden = {
        "byte_level": byte_level(),
        "pieces": scored_pieces(prefix=False),
        "prefixed_pieces": scored_pieces(prefix=True),
    }
    path = GOLDEN / "tokenizers.json"
    path.write_text(json.dumps(golden, ensure_ascii=False) + "\n", "utf-8")
    sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")
