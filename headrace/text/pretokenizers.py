"""How byte-level BPE families cut text before merging, by the name a GGUF file gives.

A cut is a sequence of regular expressions, each applied to the pieces that the one before left:
every match becomes a piece of its own. The names are those of `tokenizer.ggml.pre`; the expressions
are those of the families' published tokenizers.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS_TO_3_DIGITS = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS_TO_1_DIGIT = WORDS_TO_3_DIGITS.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    + CASED_TAIL
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}" + CASED_TAIL
)
CJK = "[一-龥ࠀ-一가-퟿]+"
DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    r"Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    r"Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True)
class PreTokenizer:
    """One family's cut. cuts: expressions, in order. nfc: normalize to NFC first. ignore_merges: a
    piece that is a token as a whole is taken without merging. add_bos: the rule where the file
    is silent."""

    cuts: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object."""
        parts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(cut), "isolated") for cut in self.cuts
        ]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(parts)

    def normalizer(self) -> normalizers.Normalizer | None:
        """The `tokenizers` normalizer, None where text is taken as it is."""
        return normalizers.NFC() if self.nfc else None


PLAIN = PreTokenizer((GPT2,))
SINGLE_DIGITS = PreTokenizer((r"\p{N}", GPT2))
LLAMA3 = PreTokenizer((WORDS_TO_3_DIGITS,), ignore_merges=True, add_bos=True)
CL100K = PreTokenizer((WORDS_TO_3_DIGITS,))
QWEN2 = PreTokenizer((WORDS_TO_1_DIGIT,), nfc=True)

PRE_TOKENIZERS = {
    "gpt-2": PLAIN,
    "gpt2": PLAIN,
    "mpt": PLAIN,
    "olmo": PLAIN,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": PreTokenizer((r"\p{N}", GPT2), nfc=True, add_bos=True),
    "codeshell": SINGLE_DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "pixtral": LLAMA3,
    "smaug-bpe": CL100K,
    "dbrx": CL100K,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "stablelm2": QWEN2,
    "megrez": QWEN2,
    "exaone": SINGLE_DIGITS,
    "minerva-7b": SINGLE_DIGITS,
    "chatglm-bpe": CL100K,
    "glm4": CL100K,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((GPT4O,)),
    "llama4": PreTokenizer((GPT4O,), add_bos=True),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, r"\p{N}+"),
        add_bos=True,
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"), add_bos=True
    ),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            ASCII_MARKS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        add_bos=True,
    ),
}
