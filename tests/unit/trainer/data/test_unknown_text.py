"""Text for which a tokenizer has no token: refused by name, or used and counted."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer.models import write_jsonl
from support.trainer.prepared import make_tokenizer, prepare, prepare_config
from support.trainer.stages import run_to_failure
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune_cli.output.results import records_text
from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.data.tokenizing.encoder import Encoder, TextExample
from finetune_trainer.data.tokenizing.unknown_text import replaced_characters

WORDS = {"the": 0, "file": 1, "<unk>": 2, "<eos>": 3, "<pad>": 4, "##s": 5, "\u2581": 6}
PIECES = [("<unk>", 0.0), ("\u2581", -1.0), ("the", -1.0), ("file", -1.0)]
BYTES = {f"<0x{byte:02X}>": 10 + byte for byte in range(256)}


def backend(model: Any, *, normalizer: Any = None, split: Any = None) -> Any:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split or pre_tokenizers.Whitespace()
    if normalizer:
        tokenizer.normalizer = normalizer
    return tokenizer


def words(**changes: Any) -> Any:
    return backend(models.WordLevel(WORDS, unk_token="<unk>"), **changes)


class Bare:
    """The attributes of a tokenizer that Encoder uses."""

    split_special_tokens = False
    bos_token_id = None
    eos_token_id = None

    def __init__(self, tokenizer: Any) -> None:
        self.backend_tokenizer = tokenizer


METASPACE = pre_tokenizers.Metaspace()
TOKENIZERS: dict[str, tuple[Any, str]] = {
    "words": (words(), "sockets"),
    "word pieces": (
        backend(models.WordPiece(WORDS, unk_token="<unk>")),
        "sockets",
    ),
    "unigram": (backend(models.Unigram(PIECES, unk_id=0), split=METASPACE), "\\u2603"),
    "BPE that drops characters": (
        backend(models.BPE({"f": 0, "\u2581": 1}, []), split=METASPACE),
        "\\u2603",
    ),
    "a removed separator": (words(split=pre_tokenizers.Split(",", "removed")), "the,"),
}


def unknown_of(tokenizer: Any, text: str) -> tuple[str, str]:
    """Return the sentence about unknown text, and the tokenizer's failure."""
    example = TextExample(text, ((0, len(text) + 1),), has_special_tokens=False)
    other = TextExample("the", ((0, 4),), has_special_tokens=False)
    encoded, _ = Encoder(Bare(tokenizer)).encode([example, other])
    return encoded.unknown, encoded.failure


@pytest.mark.parametrize("name", ["words", "word pieces"])
def test_unknown_word_is_named(name: str) -> None:
    tokenizer, word = TOKENIZERS[name]
    assert unknown_of(tokenizer, "the file") == ("", "")
    sentence, _ = unknown_of(tokenizer, "the sockets file")
    assert sentence.startswith(f"unknown text '{word}': the tokenizer has no token")


@pytest.mark.parametrize(
    ("name", "text"),
    [("unigram", "the \u2603 file"), ("BPE that drops characters", "f \u2603 f")],
)
def test_unknown_character_is_named(name: str, text: str) -> None:
    tokenizer, shown = TOKENIZERS[name]
    sentence, _ = unknown_of(tokenizer, text)
    assert sentence.startswith(f"unknown text '{shown}': the tokenizer has no token")


def test_character_that_a_tokenizer_removes_is_named() -> None:
    tokenizer, word = TOKENIZERS["a removed separator"]
    assert word in unknown_of(tokenizer, "the,file")[0]


@pytest.mark.parametrize(
    "tokenizer",
    [
        backend(
            models.BPE({"\u2581": 0, **BYTES}, [], byte_fallback=True),
            split=METASPACE,
        ),
        words(normalizer=normalizers.Lowercase()),
    ],
)
def test_tokenizer_that_has_every_byte_or_word_loses_nothing(tokenizer: Any) -> None:
    assert unknown_of(tokenizer, "The the") == ("", "")


def test_text_that_the_library_cannot_read_is_the_records_fault() -> None:
    _, failure = unknown_of(backend(models.WordLevel({"the": 0})), "the file")
    assert failure.startswith("the tokenizer cannot read it: WordLevel error")


@pytest.mark.parametrize(
    ("normalizer", "replaced"),
    [
        (None, []),
        (normalizers.NFD(), []),
        (normalizers.Lowercase(), ["A by a", "\u00c9 by \u00e9"]),
        (
            normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.NFC()]),
            [],
        ),
    ],
)
def test_replaced_characters_are_found(normalizer: Any, replaced: list[str]) -> None:
    assert replaced_characters(words(normalizer=normalizer))[:2] == replaced


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model whose tokenizer knows two words, in lower case."""
    folder = tmp_path / "words"
    make_tokenizer(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=words(normalizer=normalizers.Lowercase()),
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    return folder


RECORDS = [{"text": "The file the file"}, {"text": "the sockets sockets"}]


def test_record_with_unknown_text_is_refused(
    environment: Environment, manifest_dir: Path, model: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", RECORDS)
    message, code = run_to_failure(prepare_config(model), environment)
    assert code == ExitCode.DATA
    assert "data.jsonl:2: unknown text 'sockets': the tokenizer has no tok" in message


def test_allowed_unknown_text_is_counted_and_its_share_logged(
    environment: Environment,
    manifest_dir: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", RECORDS)
    result = prepare(prepare_config(model, unrendered="Warn"), environment)
    assert result.unrendered == 1
    assert result.invalid == 0
    assert result.train_tokens == 9
    assert result.unknown_fraction == pytest.approx(2 / 9)
    assert "22.2 % of the tokens unknown to the tokenizer" in records_text(result)
    log = capsys.readouterr().out
    assert "2 of 9 tokens (22.22%) stand for text that the tokenizer does not" in log
    assert "replaces characters of every text: A by a, " in log
