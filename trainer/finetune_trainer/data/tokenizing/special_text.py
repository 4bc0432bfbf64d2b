"""Find the texts of special tokens in a record's own texts: the tokenizer reads each as the token itself."""

import re
from typing import Any

from finetune_trainer.data.reading.unread import texts_in
from finetune_trainer.data.records.records import Fields, InvalidRecord


class SpecialText:
    """Searches the texts of records for the special tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        tokens = sorted({token.content for token in added if token.special})
        # Such a tokenizer reads them as any other text.
        if tokenizer.split_special_tokens:
            tokens = []
        self._pattern: re.Pattern[str] | None = None
        if tokens:
            # The longest first: <|end|> may be the beginning of another token.
            tokens.sort(key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, tokens)))

    def first(self, record: Fields | InvalidRecord) -> str:
        """Return the first special token whose text a record has; empty if it has none."""
        if self._pattern is None or isinstance(record, InvalidRecord):
            return ""
        # A single search: this runs for every record.
        match = self._pattern.search("\n".join(texts_in(record)))
        return match.group() if match else ""
