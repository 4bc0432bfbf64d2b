"""Measure the memory and time of merging an adapter into a 70B-shaped model, as push does.

    python bench/merge.py [--layers 80] [--rank 16] [--folder DIR] [--hidden 8192 …]

The base model has the shapes of Llama 3 70B in bf16, or others by options. All its weights are zero, so its files are
sparse and take no disk space. Each file of the merged model is emptied as soon as it is complete, so that 141 GB are
written on a disk that holds one file of 2 GB.

Prints the peak resident memory of the process, the bytes written and the seconds.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "trainer"))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from figures import add_json_option, write_figures  # noqa: E402
from finetune_trainer.models.trained import merge  # noqa: E402

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
BYTES = 2
"""Bytes of a weight in bf16."""


def linear_layers(options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Return the shapes of the linear layers of one decoder layer."""
    hidden = options.hidden
    intermediate = options.intermediate
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 8, hidden),
        "self_attn.v_proj": (hidden // 8, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def write_sparse(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a safetensors file whose tensors are holes: zeros that take no space."""
    header = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + BYTES * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def make_base(folder: Path, options: argparse.Namespace) -> Path:
    """Write the base model, one file a layer."""
    folder.mkdir()
    LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(folder)
    shapes_of_layer = linear_layers(options) | dict.fromkeys(
        LAYER_NORMS, (options.hidden,)
    )
    files: list[dict[str, tuple[int, ...]]] = [
        {
            f"model.layers.{number}.{name}.weight": shape
            for name, shape in shapes_of_layer.items()
        }
        for number in range(options.layers)
    ]
    vocabulary = (options.vocabulary, options.hidden)
    ends = {"model.embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary}
    files.append(ends | {"model.norm.weight": (options.hidden,)})
    index: dict[str, str] = {}
    for number, shapes in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        write_sparse(folder / name, shapes)
        index |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder


def make_adapter(folder: Path, options: argparse.Namespace) -> Path:
    """Write an adapter of all linear layers, with the same random factors in every layer."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in linear_layers(options).items():
        first = torch.randn(options.rank, columns)
        second = torch.randn(rows, options.rank)
        for number in range(options.layers):
            key = f"base_model.model.model.layers.{number}.{name}"
            tensors |= {
                f"{key}.lora_A.weight": first.clone(),
                f"{key}.lora_B.weight": second.clone(),
            }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": options.rank,
        "lora_alpha": 2 * options.rank,
    }
    targets = [name.rpartition(".")[2] for name in linear_layers(options)]
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"target_modules": targets})
    )
    return folder


def empty_when_written(written: list[int]) -> None:
    """Make save_file empty each file after it is complete, and record its size."""

    def save_and_empty(
        tensors: dict[str, torch.Tensor], path: Path, **options: object
    ) -> None:
        save_file(tensors, path, **options)
        written.append(path.stat().st_size)
        os.truncate(path, 0)

    setattr(merge, "save_file", save_and_empty)  # noqa: B010  the module imported the name


def main() -> None:
    """Merge and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--intermediate", type=int, default=28672)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument(
        "--shard", default=merge.SHARD, help="size of a file of the merged model"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the files are written; default: the temporary folder",
    )
    add_json_option(parser)
    options = parser.parse_args()
    merge.SHARD = options.shard
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        base = make_base(Path(folder, "base"), options)
        # In a child process, so that the memory for making the adapter is not counted.
        child = os.fork()
        if child:
            if os.waitpid(child, 0)[1]:
                sys.exit("the adapter could not be written")
        else:
            make_adapter(Path(folder, "adapter"), options)
            os._exit(0)
        written: list[int] = []
        empty_when_written(written)
        Path(folder, "merged").mkdir()
        started = time.perf_counter()
        merge.save_merged(
            base, Path(folder, "adapter"), torch.bfloat16, Path(folder, "merged")
        )
        seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{options.layers} layers, rank {options.rank}: {sum(written) / 1e9:.1f} GB in {len(written)} files"
    )
    print(f"peak memory {peak / 2**30:.2f} GiB, {seconds:.0f} s")
    figures = {"peakBytes": peak, "seconds": seconds, "bytesOfFiles": written}
    write_figures(options.json, figures)


if __name__ == "__main__":
    main()
