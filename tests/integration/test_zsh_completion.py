"""Completion, as zsh runs it: keys are typed at a real zsh on a terminal. `testcluster.deps` installs zsh."""

import os
import pty
import subprocess
import threading
import time

import pytest
from support.cli.installed_command import install

SECONDS = 30.0
TAB = "\t"
SHOW = "\x18"
SETUP = """\
autoload -Uz compinit && compinit -u -D
eval "$(finetune completion zsh)"
show() { print -r -- "$BUFFER" >> $TYPED; BUFFER= }
zle -N show
bindkey '^X' show
print ready >> $TYPED
"""


class Zsh:
    """An interactive zsh on a terminal of its own."""

    def __init__(self, folder):
        here, environment = install(folder)
        self.typed = folder / "typed"
        self.typed.touch()
        (folder / ".zshrc").write_text(SETUP)
        self.keyboard, terminal = pty.openpty()
        environment |= {
            "ZDOTDIR": str(folder),
            "TYPED": str(self.typed),
            "TERM": "xterm",
        }
        self.process = subprocess.Popen(
            ["zsh", "-i", "+o", "globalrcs"],
            cwd=here, env=environment, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        )  # fmt: skip
        os.close(terminal)
        threading.Thread(target=self._read_screen, daemon=True).start()
        self._next_line(0)

    def complete(self, words):
        """Return the command line after these words and the Tab key."""
        before = len(self.typed.read_text().splitlines())
        os.write(self.keyboard, f"{words}{TAB}{SHOW}".encode())
        return self._next_line(before)

    def _read_screen(self):
        """Read what the terminal shows, so that zsh never waits for it."""
        while self.process.poll() is None:
            try:
                os.read(self.keyboard, 4096)
            except OSError:
                return

    def _next_line(self, before):
        deadline = time.monotonic() + SECONDS
        lines = self.typed.read_text().splitlines()
        while len(lines) <= before:
            assert time.monotonic() < deadline, "zsh does not answer"
            time.sleep(0.02)
            lines = self.typed.read_text().splitlines()
        return lines[before]


@pytest.fixture
def zsh(tmp_path):
    shell = Zsh(tmp_path)
    yield shell
    shell.process.kill()
    shell.process.wait()
    os.close(shell.keyboard)


def test_zsh_completes_commands_options_runs_and_files(zsh):
    assert zsh.complete("finetune val") == "finetune validate "
    assert zsh.complete("finetune run --ke") == "finetune run --keep-serving "
    assert zsh.complete("finetune run --until tr") == "finetune run --until train "
    assert zsh.complete("finetune get doc") == "finetune get docstrings "
    assert zsh.complete("finetune validate do") == "finetune validate done.yaml "
