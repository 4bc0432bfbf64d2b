"""Parts of bench/train.py and bench/gpu.py."""
