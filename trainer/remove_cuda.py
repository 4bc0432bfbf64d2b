"""Replace the CUDA libraries of an installed PyTorch by empty ones, for an image without GPUs.

    remove_cuda.py SITE_PACKAGES

PyTorch's package index has no build for CPUs, and the one for GPUs loads all its libraries at import. The functions of
an empty library return cudaErrorNoDevice, so PyTorch finds no GPU. Those that describe an error return a text. A build
of PyTorch for CPUs is left as it is.

Runs in Dockerfile.trainer, with a C compiler (ziglang) and a reader of libraries (pyelftools) beside it.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from elftools.elf.elffile import ELFFile

NO_DEVICE = 100
"""cudaErrorNoDevice, at which PyTorch counts 0 GPUs without a warning."""
TEXT = re.compile(r"Get(Error|Status)(String|Name)$|ncclGetLastError$")
"""Functions that return a text: PyTorch would read a number in its place as an address."""
DRIVERS = re.compile(r"bitsandbytes_(cuda|rocm|xpu)")


def main(site: Path) -> None:
    """Replace the libraries that PyTorch loads, remove bitsandbytes' libraries, and say so in PyTorch's version."""
    if not (site / "nvidia").is_dir():
        return
    torch = site / "torch"
    own = [Library(path) for path in sorted((torch / "lib").glob("*.so*"))]
    needed = {name for library in own for name in library.needed}
    used = {name for library in own for name in library.undefined}
    for library in map(Library, sorted((site / "nvidia").glob("**/*.so*"))):
        if library.path.name in needed:
            write_empty(
                torch / "lib" / library.path.name,
                sorted(used & library.defined),
                library.version,
            )
    for path in (site / "bitsandbytes").glob("*.so"):
        if DRIVERS.search(path.name):
            path.unlink()
    version = torch / "version.py"
    text = replaced_once(
        r"^(__version__ = '[^+']*)[^']*'", r"\1+cpu'", version.read_text()
    )
    version.write_text(replaced_once(r"^cuda\b.*", "cuda = None", text))


def replaced_once(pattern: str, replacement: str, text: str) -> str:
    """Return the text with the line's part replaced; exit where it is not in exactly one line."""
    changed, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
    if count != 1:
        sys.exit(
            f"remove_cuda: torch/version.py has {count} lines like {pattern}, not one: adapt this program"
        )
    return changed


class Library:
    """The names in a shared library's dynamic section. C++ names are no part of CUDA's interface."""

    def __init__(self, path: Path) -> None:
        """Read the names."""
        self.path = path
        with path.open("rb") as file:
            elf = ELFFile(file)
            symbols = [
                symbol
                for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
                if symbol.name[:2] != "_Z"
            ]
            self.needed = {
                tag.needed
                for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
            }
            self.undefined = {
                symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"
            }
            self.defined = {symbol.name for symbol in symbols} - self.undefined
            versions = elf.get_section_by_name(".gnu.version_d")
            names = (
                [next(names).name for _, names in versions.iter_versions()]
                if versions
                else []
            )
        # The first is the library's own name, the others are what the users of its functions ask for.
        self.version = names[1] if len(names) > 1 else None


def write_empty(path: Path, functions: Iterable[str], version: str | None) -> None:
    """Write a library of functions that report that there is no device."""
    lines = [
        f'const char *{name}(void) {{ return "this image has no CUDA"; }}'
        if TEXT.search(name)
        else f"long {name}(void) {{ return {NO_DEVICE}; }}"
        for name in functions
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        script = Path(folder, "versions")
        source.write_text("\n".join(lines))
        script.write_text(f"{version} {{ global: *; }};")
        options = [
            "-shared",
            "-fPIC",
            "-nostdlib",
            "-fno-builtin",
            "-w",
            f"-Wl,-soname,{path.name}",
        ]
        options += [f"-Wl,--version-script={script}"] if version else []
        subprocess.run(
            [sys.executable, "-m", "ziglang", "cc", *options, "-o", path, source],
            check=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
