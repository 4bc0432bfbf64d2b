"""The state of the files at a target of a push."""

from pathlib import Path

from finetune_trainer.contract import (
    Environment,
    PushConfig,
)

FileState = tuple[int, int, bytes]


def state_of(folder: Path) -> dict[str, FileState]:
    """Return inode, modification time in ns and content of all files below a folder."""
    files = {
        str(path.relative_to(folder)): path
        for path in folder.rglob("*")
        if path.is_file()
    }
    return {
        name: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for name, path in files.items()
    }


def forget_result(config: PushConfig, environment: Environment) -> None:
    """Make the stage run again, as if it had been killed before it wrote its result."""
    (environment.stage_dir("push", config.identity) / "result.json").unlink()


def flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
