"""Detokenisation and stop strings."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer as HfTokenizer

from engine.output import TextStream
from engine.tokenizer import Detokenizer, TemplateError, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny) -> Tokenizer:
    return Tokenizer(tiny)


@pytest.mark.parametrize("text", ["héllo wörld", "🙂🙃 smile", "世界", "a\u0301e\u0301", "\U0001f468\u200d\U0001f469", "plain"])
def test_a_character_appears_only_when_it_is_whole(text, tokenizer):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert detokenizer.flush() == ""


def test_any_token_sequence_gives_the_text_that_the_whole_gives(tiny, tokenizer):
    whole = HfTokenizer.from_file(str(tiny / "tokenizer.json"))
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, 2048, 40).tolist()
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.add(token) for token in tokens] + [detokenizer.flush()]
        assert "".join(pieces) == whole.decode(tokens, skip_special_tokens=True)
        for piece in pieces:
            piece.encode("utf-8")


def test_an_unfinished_character_at_the_end_becomes_a_replacement_character(tokenizer):
    tokens = tokenizer.encode("🙂")
    assert len(tokens) > 1
    stream = TextStream(tokenizer, (), 0)
    assert stream.add(tokens[0]) == ("", False)
    assert stream.finish() == ("\ufffd", False)


@pytest.mark.parametrize(
    ("stop", "emitted"),
    [
        (("END",), "some text "),
        (("text", "some"), ""),
        (("e t",), "som"),
        (("nothing",), "some text END and more"),
        (("more!",), "some text END and more"),
    ],
)
def test_a_stop_string_is_cut_off_and_never_shown_in_part(stop, emitted, tokenizer):
    stream = TextStream(tokenizer, stop, 0)
    text = ""
    for token in tokenizer.encode("some text END and more"):
        piece, stopped = stream.add(token)
        text += piece
        assert emitted.startswith(text)
        if stopped:
            break
    else:
        text += stream.finish()[0]
    assert text == emitted


def test_stop_strings_do_not_count_before_min_tokens(tokenizer):
    (token,) = tokenizer.encode("x")
    stream = TextStream(tokenizer, ("x",), min_tokens=3)
    assert [stream.add(token) for _ in range(3)] == [("x", False), ("x", False), ("", True)]


def test_a_chat_becomes_the_tokens_that_transformers_makes_of_it(tiny, tokenizer):
    from transformers import AutoTokenizer

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi ünd <|im_end|>"}]
    theirs = AutoTokenizer.from_pretrained(tiny).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tokenizer.render_chat(messages) == theirs


def test_a_model_without_template_says_so(tiny, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "Hi"}])


def test_end_of_text_ends_a_request_unless_told_to_go_on(local, tokenizer):
    prompt = tokenizer.render_chat([{"role": "user", "content": "Explain pass in Python."}])
    common = {"max_tokens": 130, "temperature": 0.0}
    natural, ignoring, later = (
        local.generate([prompt], **common, **options)[0]
        for options in ({"ignore_eos": False}, {"ignore_eos": True}, {"ignore_eos": False, "min_tokens": 125})
    )
    assert natural.finish_reason == "stop"
    assert natural.tokens[-1] == 2 and 2 not in natural.tokens[:-1]
    assert "<|im_end|>" not in natural.text
    assert ignoring.tokens[: len(natural.tokens)] == natural.tokens
    assert (len(ignoring.tokens), ignoring.finish_reason) == (130, "length")
    assert len(later.tokens) >= 125 and 2 not in later.tokens[:124]
