"""The line of a command that works for seconds: on a terminal only, and gone before the output."""

import io

from finetune_cli.output.working import working


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_shows_the_text_literally_and_then_clears_it(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    with working("reading [red] …"):
        pass
    shown = terminal.getvalue()
    assert "reading [red] …" in shown
    assert shown.rstrip().endswith("\x1b[2K")


def test_pipe_has_nothing_of_it(capsys):
    with working("reading …"):
        pass
    assert capsys.readouterr().err == ""
