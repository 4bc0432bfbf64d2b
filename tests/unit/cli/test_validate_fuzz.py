"""Whatever is in the file: a verdict, never a traceback."""

import contextlib
import io
import re
import string
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_cli.__main__ import main

VALID = [file.read_bytes() for file in sorted(Path(__file__).parents[2].glob("data/*.yaml"))]
NONSENSE = [
    b"", b"\t", b":", b": ", b"- ", b"[", b"]", b"{", b"}", b"'", b'"', b"&a ", b"*a ", b"<<: ", b"!!binary ", b"!x ",
    b"|\n", b">\n", b"%", b"@", b"`", b"#", b"---\n", b"...\n", b"? ", b"~", b"null", b"yes", b".inf", b"1e999", b"0x",
    b"0b", b"1_", b"-0", b"9" * 40, b"\xff", b"\x00", b"\xef\xbb\xbf", b"\r", b"\r\n", b"\n\n", b"\xc2\x85",
    b"\xe2\x80\xa8", b'"\\ud800"', b"\xf0\x9f\x98\x80", b"{{ x }}", b"[[]]", b"{? [a] : b}", b"2024-01-01", b"1:30",
    b"=", b"\x7f", b"=: 1\n",
]  # fmt: skip


@st.composite
def mutations(draw):
    """Give a valid manifest with a few cuts, repeats, swaps and insertions."""
    content = draw(st.sampled_from(VALID))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 60)))
        piece = draw(st.one_of(st.sampled_from(NONSENSE), st.binary(max_size=6), st.just(content[start:end] * 2)))
        content = content[:start] + piece + content[end:]
    return content


@st.composite
def wrong_values(draw):
    """Give a valid manifest where some values are of another type; it stays YAML."""
    lines = draw(st.sampled_from(VALID)).decode().splitlines()
    values = st.one_of(
        st.sampled_from(["", "~", "[]", "{}", "-1", "0", "1.5", "true", "x", "[a, [b]]", "{a: {b: c}}", "1e400", '""']),
        st.text(string.printable, max_size=8).map(repr),
    )
    for _ in range(draw(st.integers(1, 6))):
        index = draw(st.integers(0, len(lines) - 1))
        lines[index] = re.sub(r": .*$", lambda _: f": {draw(values)}", lines[index], count=1)
    return "\n".join(lines).encode()


def verdict(content):
    """Validate these bytes; give the exit code and what was said."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pipeline.yaml")
        file.write_bytes(content)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = main(["validate", str(file)])
        return code, said.getvalue().replace(str(file), "FILE").splitlines()


def assert_sound(content):
    code, said = verdict(content)
    lines = max(1, len(content.decode("utf-8", "replace").rstrip("\r\n").split("\n")))
    assert said
    assert code in {0, 2}
    assert (code == 0) == said[-1].startswith("FILE: valid")
    for problem in said:
        place = re.match(r"FILE:(\d+): ", problem)
        assert problem.startswith("FILE: valid") or (place and 1 <= int(place[1]) <= lines), problem


@settings(max_examples=150, deadline=None)
@given(mutations())
def test_random_damage_gets_a_verdict_with_lines_inside_the_file(content):
    assert_sound(content)


@settings(max_examples=100, deadline=None)
@given(wrong_values())
def test_random_values_get_a_verdict_with_lines_inside_the_file(content):
    assert_sound(content)


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))))
def test_random_bytes_get_a_verdict_with_lines_inside_the_file(content):
    assert_sound(content)
