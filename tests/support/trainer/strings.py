"""Strings for comparing tokenizers: languages, code, emoji, spaces, control characters and special tokens."""

import random

# ruff: noqa: RUF001  letters that look alike are meant
WORDS = (
    *("reader", "parser", "file", "socket", "lock", "returns", "naïve", "façade", "Straße"),
    *("İstanbul", "ﬁancé", "Ω≈ç√", "привет", "мир", "γειά", "σου", "שלום", "عالم", "नमस्ते"),
    *("สวัสดี", "中文", "日本語", "カタカナ", "한국어", "tiếng", "Việt", "don't", "it's", "3.14"),
    *("1,000,000", "0x1F", "10⁻³", "½", "№"),
)  # fmt: skip
CODE = (
    "def f(x):\n    return x**2  # square\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    '{"key": [1, 2.5e-3, null, "\\u00e9"]}',
    "SELECT * FROM t WHERE a != 'b' -- c",
    "<div class='x'>&amp;</div>",
    "\\frac{a}{b} \\\\ $x_1$",
)
EMOJI = ("😀", "👩‍👩‍👧", "🇩🇪", "✋🏽", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🤷🏻‍♂️")
SPACES = (
    *("", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\r\n", " \n ", "\xa0"),
    *("\u200b", "\u2003", "\u3000", "\ufeff", "▁", "▁▁", "\u200d"),
)
CONTROL = ("\x00", "\x07", "\x1b[0m", "\x7f", "\ufffd", "\u0301", "e\u0301", "\u202e")
SPECIAL = (
    *("<s>", "</s>", "<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<|im_end", "im_end|>"),
    *("<0x41>", "<0xFF>", "<image_soft_token>", "[INST]", "<think>", "</think>", "<s"),
)  # fmt: skip
KINDS = (WORDS, CODE, EMOJI, SPACES, CONTROL, SPECIAL)


def many_strings(count: int = 1000) -> list[str]:
    """Return different strings, the same ones in every run: each piece alone, then random joins of pieces."""
    generator = random.Random(count)
    strings = dict.fromkeys(piece for kind in KINDS for piece in kind)
    strings |= dict.fromkeys((*_planes(), "a" * 300, " " * 70, "\n" * 40, "=" * 33))
    while len(strings) < count:
        pieces = []
        for _ in range(generator.randint(2, 9)):
            pieces += [generator.choice(generator.choice(KINDS))]
            pieces += [generator.choice(SPACES)]
        strings["".join(pieces)] = None
    return list(strings)[:count]


def _planes() -> list[str]:
    """Return a string of eight neighbouring characters from every part of Unicode that has letters."""
    starts = (*range(0x20, 0x3000, 0x100), *range(0x4E00, 0x9000, 0x800), 0x1D400, 0x20000)  # fmt: skip
    return ["".join(chr(start + step) for step in range(8)) for start in starts]
