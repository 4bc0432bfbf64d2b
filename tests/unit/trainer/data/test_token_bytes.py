"""Tokens located by their bytes have the positions of the tokenizer's own offsets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.trainer.models import SENTENCES
from support.trainer.prepared import make_tokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from finetune_trainer.data.tokenizing.encoder import Encoder, TextExample
from finetune_trainer.data.tokenizing.token_bytes import TokenBytes

many_examples = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
texts = st.lists(
    st.sampled_from(
        [*" \nabenops the.,éß漢🙂<", "e\u0301", "<eos>", "<bos>", " <tool> ", "ﬁ"]
    ),
    max_size=20,
)


def with_nfc(backend: Tokenizer) -> None:
    backend.normalizer = normalizers.NFC()


def with_lower_case(backend: Tokenizer) -> None:
    backend.normalizer = normalizers.Lowercase()


def with_stripping_token(backend: Tokenizer) -> None:
    backend.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True)])


CHANGES: dict[str, Any] = {
    "plain": None,
    "BOS": None,
    "NFC": with_nfc,
    "lower case": with_lower_case,
    "stripping token": with_stripping_token,
}


@pytest.fixture(scope="module", params=CHANGES)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    tokenizer = make_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), writes_bos=request.param == "BOS"
    )
    change = CHANGES[request.param]
    if change:
        change(tokenizer.backend_tokenizer)
    return tokenizer


@many_examples
@given(
    pieces=texts,
    bounds=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    is_chat=st.booleans(),
)
def test_masks_are_those_of_offsets(
    *, tokenizer: Any, pieces: list[str], bounds: list[int], is_chat: bool
) -> None:
    text = "".join(pieces)
    first, second, third, last = sorted(min(bound, len(text) + 1) for bound in bounds)
    example = TextExample(
        text, ((first, second), (third, last)), has_special_tokens=is_chat
    )
    by_bytes = Encoder(tokenizer)
    # Also for tokenizers for which it is of no use: it is only slower.
    by_bytes._token_bytes = TokenBytes(tokenizer.backend_tokenizer)
    by_offsets = Encoder(tokenizer)
    by_offsets._token_bytes = None

    [(document, _, _)] = by_bytes.encode([example])
    [(expected, _, _)] = by_offsets.encode([example])
    assert document.tokens.tolist() == expected.tokens.tolist()
    assert document.loss_mask.tolist() == expected.loss_mask.tolist()
    assert by_bytes.boundary_tokens == by_offsets.boundary_tokens


def sentence_pieces() -> Tokenizer:
    """Return a tokenizer whose tokens have ▁ for a space, and no bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<eos>"]),
    )
    return backend


def test_other_tokenizers_have_no_bytes(tmp_path: Path) -> None:
    assert TokenBytes.of(sentence_pieces()) is None
    assert TokenBytes.of(make_tokenizer(tmp_path).backend_tokenizer) is not None
    prefixed = make_tokenizer(tmp_path).backend_tokenizer
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert TokenBytes.of(prefixed) is None


def test_tokenizer_without_bytes_uses_offsets() -> None:
    backend = sentence_pieces()
    settings = SimpleNamespace(
        backend_tokenizer=backend,
        split_special_tokens=False,
        bos_token_id=None,
        eos_token_id=backend.token_to_id("<eos>"),
    )
    [(document, _, _)] = Encoder(settings).encode(
        [TextExample("the file opens", ((8, 15),), has_special_tokens=False)]
    )
    trained = backend.decode(
        document.tokens[document.loss_mask == 1].tolist(), skip_special_tokens=False
    )
    assert trained.replace(" ", "") == "opens<eos>"
