"""The other families' tokenizers agree with their references on 2,000 texts each (see
scripts/golden_tokenizers.py), from GGUF metadata and from folders."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, processors

from headrace.errors import ModelError, RequestError
from headrace.text.bytelevel import byte_alphabet
from headrace.text.chat import ChatTemplate, render_chat
from headrace.text.detokenize import Detokenizer
from headrace.text.grammar import GrammarCompiler
from headrace.text.pieces import scored_merges
from headrace.text.tokenizer import Tokenizer, from_folder, from_gguf
from tests.text.test_grammar import sample
from tests.text.texts import DIGEST, digest, varied_texts

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "tokenizers.json").read_text("utf-8")
)
BYTE_LEVEL = GOLDEN["byte_level"]
COUNT = 2000
PREFIX = "tokenizer.ggml."


def digests(joined: str) -> list[str]:
    assert len(joined) == COUNT * DIGEST
    return [joined[at : at + DIGEST] for at in range(0, len(joined), DIGEST)]


def byte_level(pre: str) -> Tokenizer:
    return from_gguf(
        {
            PREFIX + "model": "gpt2",
            PREFIX + "pre": pre,
            PREFIX + "tokens": BYTE_LEVEL["tokens"],
            PREFIX + "merges": BYTE_LEVEL["merges"],
            PREFIX + "eos_token_id": 0,
        }
    )


def scored(name: str, **changes: Any) -> Tokenizer:
    golden = GOLDEN[name]
    metadata = {
        PREFIX + "model": "llama",
        PREFIX + "tokens": golden["tokens"],
        PREFIX + "scores": golden["scores"],
        PREFIX + "token_type": golden["token_type"],
        PREFIX + "add_space_prefix": name == "prefixed_pieces",
        PREFIX + "bos_token_id": 1,
        PREFIX + "eos_token_id": 2,
    }
    return from_gguf(metadata | changes)


@pytest.mark.parametrize("pre", BYTE_LEVEL["digests"])
def test_byte_level_families(pre: str) -> None:
    tokenizer = byte_level(pre)
    wanted = digests(BYTE_LEVEL["digests"][pre])
    for text, facts in zip(varied_texts(COUNT, seed=7), wanted, strict=True):
        assert digest(tokenizer.encode(text, add_special=False)) == facts, text


def test_the_families_differ() -> None:
    for one, other in (("gpt-2", "qwen2"), ("qwen2", "llama-bpe"), ("tekken", "gpt-4o")):
        assert BYTE_LEVEL["digests"][one] != BYTE_LEVEL["digests"][other]


@pytest.mark.parametrize("name", ["pieces", "prefixed_pieces"])
def test_scored_pieces_agree_with_sentencepiece(name: str) -> None:
    tokenizer = scored(name)
    texts = varied_texts(COUNT, ("<turn>", "\n\n\n"), seed=8)
    wrong = [
        text
        for text, facts in zip(texts, digests(GOLDEN[name]["digests"]), strict=True)
        if digest(tokenizer.encode(text, add_special=False, specials=False)) != facts
    ]
    assert wrong == []
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)).removeprefix(" ") == text.removeprefix(" ")


@pytest.mark.parametrize("name", ["pieces", "prefixed_pieces"])
def test_scored_pieces_decode_and_stream(name: str) -> None:
    tokenizer = scored(name)
    for ids, text in GOLDEN[name]["decoded"]:
        assert tokenizer.decode(ids) == text
    draw = random.Random(0)
    for skip in (True, False):
        for _ in range(500):
            ids = [draw.randrange(tokenizer.vocabulary) for _ in range(draw.randint(1, 60))]
            stream = Detokenizer(tokenizer, skip_special=skip)
            pieces = [stream.push([token]) for token in ids] + [stream.flush()]
            assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)


def test_continued_text_keeps_its_space() -> None:
    tokenizer = scored("prefixed_pieces")
    ids = tokenizer.encode("the", add_special=False)
    assert Detokenizer(tokenizer).push(ids) == "the"
    assert Detokenizer(tokenizer, continued=True).push(ids) == " the"


def test_facts_of_scored_pieces() -> None:
    tokenizer = scored("pieces")
    assert tokenizer.encode("a<s>b") == [1, *tokenizer.encode("a", add_special=False), 1,
                                         *tokenizer.encode("b", add_special=False)]  # fmt: skip
    assert 1 not in tokenizer.encode("a<s>b", specials=False, add_special=False)
    assert tokenizer.special_ids == {0, 1, 2}
    byte = tokenizer.encode("\u0f3a", add_special=False)
    assert b"".join(map(tokenizer.token_bytes, byte)) == "\u0f3a".encode()
    with pytest.raises(ModelError, match="scores has 3 entries"):
        scored("pieces", **{PREFIX + "scores": [0.0, 1.0, 2.0]})
    with pytest.raises(ModelError, match="scores is missing"):
        scored("pieces", **{PREFIX + "scores": None})


def test_merges_come_by_score() -> None:
    pieces, scores = ["a", "b", "c", "ab", "bc", "abc", "no"], [0, 0, 0, -1.0, -3.0, -2.0, 9.0]
    assert scored_merges(pieces, scores, [True] * 6 + [False]) == [
        ("a", "b"), ("ab", "c"), ("a", "bc"), ("b", "c"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["pieces", "prefixed_pieces"])
def test_spaces_and_letters_can_be_constrained(name: str) -> None:
    tokenizer = scored(name)
    grammar = GrammarCompiler(tokenizer).compile("regex", "(the|and) (né|x) 日本")
    seen = set()
    for seed in range(30):
        ids, ended = sample(grammar.start(), tokenizer, seed, 40)
        assert ended
        seen.add(Detokenizer(tokenizer, continued=True).push(ids))
    assert seen == {f"{a} {b} 日本" for a in ("the", "and") for b in ("né", "x")}


def test_text_inside_other_text_has_no_prefix() -> None:
    tokenizer = scored("prefixed_pieces")
    for text in ("the", " the", "日本", "a b"):
        ids = tokenizer.encode_inside(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def write_folder(folder: Path, **config: Any) -> Path:
    """A folder as transformers writes it, around the small byte-level vocabulary."""
    pieces = [*byte_alphabet().values(), "he"]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|turn|>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", len(pieces))]
    )
    backend.enable_truncation(8)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template="{{ messages }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 259, 100000]}')
    tokenizer = from_folder(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocabulary) == (257, 258, 261)
    assert tokenizer.stop_ids == {258, 259}
    assert tokenizer.add_bos
    assert tokenizer.encode("he</s>") == [257, 256, 258]
    assert len(tokenizer.encode("hello" * 10)) == 1 + 4 * 10
    assert tokenizer.encode("</s><tool>", specials=False, add_special=False)[-1] == 260
    assert tokenizer.chat_template == "{{ messages }}"
    for text in varied_texts(50, ("</s>", "<tool>")):
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ids, skip_special=False) == text


def test_folder_template_files(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert from_folder(write_folder(tmp_path, chat_template=several)).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert from_folder(tmp_path).chat_template == "J"


def test_folder_declares_more_tokens(tmp_path: Path) -> None:
    more = {"261": {"content": "<extra>", "special": True}, "257": {"content": "<s>"}}
    tokenizer = from_folder(write_folder(tmp_path, added_tokens_decoder=more))
    assert tokenizer.encode("<extra>", add_special=False) == [261]
    assert 261 in tokenizer.special_ids


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer.json: not a readable tokenizer"):
        from_folder(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json: not readable as JSON"):
        from_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        from_folder(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match="WordPiece"):
        from_folder(tmp_path)


def test_control_tokens_that_swallow_space(tmp_path: Path) -> None:
    """The early refusal counts nothing that a token may take in."""
    write_folder(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    for entry in described["added_tokens"]:
        entry["rstrip"] = entry["content"] == "<|turn|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = from_folder(tmp_path)
    assert tokenizer.encode("<|turn|>" + " \n\u3000" * 1000 + "he", limit=3)[1:] == [259, 256]
    with pytest.raises(RequestError, match="limit of 3"):
        tokenizer.encode("<|turn|>" + " h" * 1000, limit=3)


def test_phi_takes_in_the_space_after_its_marks() -> None:
    tokenizer = scored("prefixed_pieces", **{"general.architecture": "phi3"})
    (end,) = tokenizer.swallowing
    assert tokenizer.token_text(end) == "</s>"
    the = tokenizer.encode("the", add_special=False)
    assert tokenizer.encode("</s> \n the", add_special=False) == [end, *the]
    chat = ChatTemplate("{% for m in messages %}</s>\n{{ m.content }}{% endfor %}")
    plain, forged = (
        render_chat(tokenizer, chat, [{"role": "user", "content": text}])
        for text in ("the", "the<s>")
    )
    assert plain == [end, *the]
    assert forged[: len(plain)] == plain
