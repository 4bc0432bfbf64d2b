"""Validation of random files: it always ends with a result, never with a traceback."""

import contextlib
import io
import re
import string
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_cli.__main__ import main

VALID = [
    file.read_bytes() for file in sorted(Path(__file__).parents[2].glob("data/*.yaml"))
]
FRAGMENTS = [
    b"", b"\t", b":", b": ", b"- ", b"[", b"]", b"{", b"}", b"'", b'"', b"&a ", b"*a ", b"<<: ", b"!!binary ", b"!x ",
    b"|\n", b">\n", b"%", b"@", b"`", b"#", b"---\n", b"...\n", b"? ", b"~", b"null", b"yes", b".inf", b"1e999", b"0x",
    b"0b", b"1_", b"-0", b"9" * 40, b"\xff", b"\x00", b"\xef\xbb\xbf", b"\r", b"\r\n", b"\n\n", b"\xc2\x85",
    b"\xe2\x80\xa8", b'"\\ud800"', b"\xf0\x9f\x98\x80", b"{{ x }}", b"[[]]", b"{? [a] : b}", b"2024-01-01", b"1:30",
    b"=", b"\x7f", b"=: 1\n",
]  # fmt: skip


@st.composite
def mutations(draw):
    """Draw a valid manifest with a few deletions, repetitions, replacements and insertions."""
    content = draw(st.sampled_from(VALID))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 60)))
        replacement = draw(
            st.one_of(
                st.sampled_from(FRAGMENTS),
                st.binary(max_size=6),
                st.just(content[start:end] * 2),
            )
        )
        content = content[:start] + replacement + content[end:]
    return content


@st.composite
def wrong_values(draw):
    """Draw a valid manifest with some values of another type; it is still YAML."""
    lines = draw(st.sampled_from(VALID)).decode().splitlines()
    values = st.one_of(
        st.sampled_from(
            [
                "",
                "~",
                "[]",
                "{}",
                "-1",
                "0",
                "1.5",
                "true",
                "x",
                "[a, [b]]",
                "{a: {b: c}}",
                "1e400",
                '""',
            ]
        ),
        st.text(string.printable, max_size=8).map(repr),
    )
    for _ in range(draw(st.integers(1, 6))):
        index = draw(st.integers(0, len(lines) - 1))
        lines[index] = re.sub(
            r": .*$", lambda _: f": {draw(values)}", lines[index], count=1
        )
    return "\n".join(lines).encode()


def validate(content):
    """Validate these bytes; return the exit code and the printed lines."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pipeline.yaml")
        file.write_bytes(content)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = main(["validate", str(file)])
        return code, output.getvalue().replace(str(file), "FILE").splitlines()


def assert_result_is_consistent(content):
    """Check that exit code and output agree, and that every diagnostic has a line inside the file."""
    code, output = validate(content)
    line_count = max(
        1, len(content.decode("utf-8", "replace").rstrip("\r\n").split("\n"))
    )
    assert output
    assert code in {0, 2}
    assert (code == 0) == output[-1].startswith("FILE: valid")
    for printed in output:
        position = re.match(r"FILE:(\d+): ", printed)
        assert printed.startswith("FILE: valid") or (
            position and 1 <= int(position[1]) <= line_count
        ), printed


@settings(max_examples=150, deadline=None)
@given(mutations())
def test_mutated_manifest_gets_diagnostics_inside_the_file(content):
    assert_result_is_consistent(content)


@settings(max_examples=100, deadline=None)
@given(wrong_values())
def test_wrong_values_get_diagnostics_inside_the_file(content):
    assert_result_is_consistent(content)


@settings(max_examples=50, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")),
    )
)
def test_random_bytes_get_diagnostics_inside_the_file(content):
    assert_result_is_consistent(content)
