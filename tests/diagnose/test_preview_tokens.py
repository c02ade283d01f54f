"""Token ids as text: nothing lost, nothing that steers a terminal, no two texts that look alike."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune.data.templates import AnswerTokens
from finetune.diagnose.preview_splits import on_one_line, read_pieces, special_looking_text, visible_token
from tests.tiny import tiny_tokenizer

HARD_TEXT = "naïve 🙂 日本語 a\tb\r\n\x1b[31mred\x07 \u202egnp.exe \u200b\u00a0 end"


@pytest.mark.slow
def test_no_character_at_all_steers_a_terminal():
    for code in range(0x110000):
        shown = visible_token(chr(code))
        assert shown == "↵\n" if code == 10 else shown.isprintable(), hex(code)
        assert on_one_line(chr(code)).isprintable(), hex(code)


def test_no_two_texts_look_alike():
    parts = ["\n", "↵", "\t", "⇥", "\x1b", "<U+001B>", "<U+003C>", "<", "U+001B>", "<U+", "a"]
    texts = {"".join(words) for length in (1, 2, 3) for words in itertools.product(parts, repeat=length)}
    assert len({visible_token(text) for text in texts}) == len(texts)


@pytest.mark.parametrize("style", ["phi4_mini", "phi3", "phi4", "none"])
def test_pieces_hold_every_token_and_the_whole_text(style):
    tokenizer = tiny_tokenizer(style)
    ids = tokenizer(f"Please send <|endoftext|>{HARD_TEXT}", add_special_tokens=False)["input_ids"]
    loss = [position > 3 for position in range(len(ids))]
    pieces = read_pieces(tokenizer, ids, loss, AnswerTokens(tokenizer).special_ids)
    assert [token for piece in pieces for token in piece.token_ids] == ids
    assert [piece.carries_loss for piece in pieces for _ in piece.token_ids] == loss
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert [piece.text for piece in pieces if piece.is_special] == ["<|endoftext|>"]
    # The smiling face is four bytes, of which this tokenizer makes four tokens: one piece.
    assert [len(piece.token_ids) for piece in pieces if piece.text == "🙂"] == [4]


def test_a_character_that_was_cut_in_two_ends_with_its_loss():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("🙂a", add_special_tokens=False)["input_ids"]
    pieces = read_pieces(tokenizer, ids, [False, False, True, True, True], ())
    assert [(piece.carries_loss, len(piece.token_ids)) for piece in pieces][-1] == (True, 1)
    assert sum(len(piece.token_ids) for piece in pieces if not piece.carries_loss) == 2
    assert pieces[-1].text == "a"


def test_spaces_that_a_decoder_drops_at_the_beginning_are_kept_inside():
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁big": 2, "▁world": 3, "<|user|>": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<|user|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    pieces = read_pieces(tokenizer, [1, 2, 3], [False] * 3, {4})
    assert [piece.text for piece in pieces] == ["Hello", " big", " world"]


def test_an_id_without_a_token_is_shown_as_such():
    (piece,) = read_pieces(tiny_tokenizer(), [100_000], [False], ())
    assert piece.text == "<id 100000>"


def test_what_only_looks_like_a_special_token_is_found():
    tokenizer = tiny_tokenizer("phi4")
    ids = tokenizer("<|im_end|> <|end|> [INST] <|end|> a <|b c|> </s>", add_special_tokens=False)["input_ids"]
    pieces = read_pieces(tokenizer, ids, [False] * len(ids), AnswerTokens(tokenizer).special_ids)
    assert special_looking_text(pieces) == ["<|end|>", "[INST]", "</s>"]
